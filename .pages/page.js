// j and k go to the next note and to the one before, below the bar
const notes = [...document.querySelectorAll("aside")], bar = document.querySelector(".bar");
document.documentElement.style.setProperty("--top", `${bar.offsetHeight}px`);
document.querySelector(":target")?.scrollIntoView();
onkeydown = ({ key, ctrlKey, metaKey, altKey }) => {
  if (ctrlKey || metaKey || altKey || !"jk".includes(key)) return;
  const here = notes.findLastIndex((note) => note.getBoundingClientRect().top < bar.offsetHeight + 9);
  notes[key === "j" ? here + 1 : here - 1]?.scrollIntoView();
};
