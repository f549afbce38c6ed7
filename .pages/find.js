// The rows whose quoted texts occur in a log: causes first, then the longest texts, then the earliest line
const [log, list, nothing, several, excerpt] = ["log", "rows", "nothing", "several", "excerpt"].map((id) => document.getElementById(id));
const NO_CAUSE = /^.*(warning|childfailederror|error_file).*$|^\W?[wi]\d{4}\b.*$/gm; // warnings, torchrun's report
const POINTS_UP = /(error|traceback).{0,40}\b(above|earlier)\b/i; // a row that sends the reader to an earlier error
const WITH = /^ with (\S+: )?$/; // between two texts that the log must both have
const ANYTHING = /(…|\.{3}|"[^"]*"|\S*\/\S+|\S+\.pt\b|(?<!-|signal:? |errno: )\b\d[\d.:]*|\s+)/; // numbers, paths, ...
const clean = (text) => text.toLowerCase().replace(/\x1b\[[\d;]*m|\[[a-z]*\d+\]: ?/g, "").replace(/ *: */g, ": ");

function pattern(text) { // size: how many characters of a log are as quoted
  const pieces = text.replace(RegExp(`^${ANYTHING.source}+`), "").split(ANYTHING);
  const source = pieces.map((piece, n) => n % 2 ? piece.trim() ? ".{0,300}?" : "\\s+" : piece.replace(/\W/g, "\\$&"));
  return { size: pieces.filter((_, n) => n % 2 === 0).join("").length, regexp: RegExp(source.join("")) };
}

function quoted(texts, { textContent, previousSibling, nextSibling }) { // a whole text, then its long parts between "..."
  const text = clean(textContent.replace(/\b(FILE|FOLDER|HOST|JOB|PATH|USER)\b/g, "…"));
  const patterns = [text, ...text.split(/ *(?:…|\.{3}) */).filter((part) => part.length > 20)].map(pattern);
  if (WITH.test(previousSibling?.textContent)) texts.at(-1).needs.push(patterns[0].regexp);
  else if (WITH.test(nextSibling?.textContent) || patterns[0].size > 7 && /[^-a-z_.()/=]/.test(textContent)) // no option or name
    texts.push({ patterns, needs: [] });
  return texts;
}

const search = (text, texts, whole) => texts.filter(({ needs }) => needs.every((each) => each.test(whole)))
  .flatMap(({ patterns }) => patterns.find(({ regexp }) => regexp.test(text)) ?? [])
  .map(({ size, regexp }) => ({ size, at: text.search(regexp) }));
const rows = Array.from(list.children, (row) => [row, [...row.firstChild.querySelectorAll("code")].reduce(quoted, [])]);
log.oninput = () => {
  const text = clean(log.value), without = text.replace(NO_CAUSE, (line) => " ".repeat(line.length)), hits = [];
  const errors = without.trim() ? without : text; // only warnings
  for (const [row, texts] of rows) {
    const causes = search(errors, texts, text), all = causes.length ? causes : search(text, texts, text);
    const line = text.slice(0, Math.min(...all.map(({ at }) => at))).split("\n").length;
    const size = all.reduce((sum, each) => sum + each.size, 0);
    if (size) hits.push({ row, line, size, rank: causes.length ? POINTS_UP.test(row.textContent) + row.textContent.includes("One of: ") / 2 : 2 });
  }
  hits.sort((a, b) => a.rank - b.rank || b.size - a.size || a.line - b.line);
  list.replaceChildren(...(hits.length ? hits.map(({ row }) => row) : rows.map(([row]) => row)));
  nothing.hidden = !text.trim() || hits[0]?.rank < 1;
  several.hidden = hits[0]?.rank !== 0.5;
  const own = nothing.hidden ? -1 : errors.search(/^[\w. ]*(error|exception): /m); // that no row has
  const first = own < 0 ? Math.min(...hits.filter(({ rank }) => rank === hits[0].rank).map(({ line }) => line))
    : errors.slice(0, own).split("\n").length, lines = log.value.split("\n");
  const cuts = [Math.max(first - 3, 0), first - 1, first, first + 2];
  [...excerpt.children].forEach((part, n) => part.textContent = lines.slice(cuts[n], cuts[n + 1]).join("\n") + "\n");
  excerpt.hidden = !hits.length && own < 0;
};
