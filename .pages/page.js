// The row of steps with its keys and buttons, the fold, and "only changes"
const all = (selector) => [...document.querySelectorAll(selector)];
const bands = all("aside"), bar = document.querySelector(".steps"), brief = document.getElementById("brief");
let here = -1; // the band that was last shown
function show() { // the step of the address: its note, and its lines
  const target = document.getElementById(location.hash.slice(1));
  const band = target?.matches("aside") ? target : target?.querySelector("aside");
  if (band) here = bands.indexOf(band);
  const look = (target?.closest(".changed") ?? band)?.className.match(/t\d/)?.[0];
  for (const details of [target?.closest("details"), target?.querySelector("aside details")]) if (details) details.open = true;
  if (bar) document.documentElement.style.setProperty("--top", Math.max(bar.parentNode.offsetHeight, bar.offsetHeight) + "px");
  for (const each of all(".chip, .changed")) each.classList.toggle("on", !!look && each.classList.contains(look));
  all(".chip.on")[0]?.scrollIntoView({ block: "nearest" });
  target?.scrollIntoView();
}
const go = (by) => { // to the next band, or to the one before
  const to = bands[Math.min(Math.max(here + by, 0), bands.length - 1)];
  if (to) location.hash = to.id;
};
const fold = () => all(".fold").forEach((each, _, [{ open }]) => each.open = !open);
onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("textarea")) return;
  ({ j: () => go(1), k: () => go(-1), o: fold })[event.key]?.();
};
onclick = ({ target }) => ({ next: () => go(1), back: () => go(-1) })[target.closest("button")?.id]?.();
if (brief) {
  brief.checked = sessionStorage.brief === "true"; // also on the next page
  brief.onchange = () => sessionStorage.brief = brief.checked;
}
(onhashchange = show)();
