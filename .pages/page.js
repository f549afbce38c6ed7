// The row of steps with its keys and buttons, folds, and any two scripts
const all = (selector) => [...document.querySelectorAll(selector)];
const chips = all(".chip"), picks = all("select"), bar = document.querySelector(".steps");
function show() { // the step of the address: its note, and its lines
  const target = document.getElementById(location.hash.slice(1));
  const look = (target?.closest(".changed") ?? target?.querySelector("aside"))?.className.match(/t\d/)?.[0];
  for (const details of [target?.closest("details"), target?.querySelector("aside details")]) if (details) details.open = true;
  if (bar) document.documentElement.style.setProperty("--top", Math.max(bar.parentNode.offsetHeight, bar.offsetHeight) + "px");
  for (const each of all(".chip, .changed")) each.classList.toggle("on", !!look && each.classList.contains(look));
  all(".chip.on")[0]?.scrollIntoView({ block: "nearest" });
  target?.scrollIntoView();
}
const go = (by) => { // to the next step, or to the one before
  const here = chips.findIndex((chip) => chip.matches(".on")), to = chips[Math.min(Math.max(here + by, 0), chips.length - 1)];
  if (to) location.hash = to.hash;
};
const fold = () => all(".fold").forEach((each, _, [{ open }]) => each.open = !open);
onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("textarea, select")) return;
  ({ j: () => go(1), k: () => go(-1), o: fold })[event.key]?.();
};
onclick = ({ target }) => ({ next: () => go(1), back: () => go(-1) })[target.closest("button")?.id]?.();
onchange = ({ target }) => {
  const [a, b] = picks.map((pick) => pick.selectedIndex).sort((a, b) => a - b);
  if (picks.includes(target) && a < b) location = `${picks[0][a].value}-${picks[0][b].value}.html`;
};
onpageshow = () => picks.forEach((pick) => pick.value = pick.querySelector("[selected]").value);
(onhashchange = show)();
