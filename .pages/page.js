// Keys and buttons from step to step, "only changes", any two scripts, and the panel of a mark
const all = (selector) => [...document.querySelectorAll(selector)];
const [panel, frame, brief] = ["panel", "frame", "brief"].map((id) => document.getElementById(id));
const steps = all(".step"), lines = all(".equal, .changed"), picks = all("select");
const go = (by) => {
  const here = steps.findIndex((step) => "#" + step.id === location.hash);
  if (steps.length) location.replace("#" + steps[Math.min(Math.max(here + by, 0), steps.length - 1)].id);
};
onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("textarea, select")) return;
  ({ j: () => go(1), k: () => go(-1), Escape: () => panel.close() })[event.key]?.();
};
onclick = ({ target }) => {
  ({ next: () => go(1), back: () => go(-1), close: () => panel.close() })[target.id]?.();
  if (target.matches("a.mark")) panel.show(), frame.contentWindow.location.replace("marks.html#" + target.textContent);
};
onchange = ({ target }) => {
  const [a, b] = picks.map((pick) => pick.selectedIndex).sort((a, b) => a - b);
  const far = (n) => target.checked && !lines.slice(Math.max(n - 3, 0), n + 4).some((line) => line.matches(".changed"));
  if (target === brief) lines.forEach((line, n) => line.classList.toggle("far", far(n)));
  else if (a < b) location = `${picks[0][a].value}-${picks[0][b].value}.html`;
};
if (self !== top) document.body.className = "framed";
