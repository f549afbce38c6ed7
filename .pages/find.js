// The rows whose quoted texts occur in a log: first those of its earliest error, and of them those with the longest texts
const [log, list, nothing, several, raised, excerpt] = ["log", "rows", "nothing", "several", "raised", "excerpt"].map((id) => document.getElementById(id));
const NO_CAUSE = [ // lines, and parts of lines, that choose a row only if nothing before them in this list does
  /^.*(exitcode|received by pid).*$/gm, // how a process ended
  /^.*(childfailederror|error_file|closing signal|death signal|got signal|exited with exit code|terminating stepid).*$|process group watchdog.*exception: /gm, // that something failed
  /^.*(warning|nccl info).*$|^\W?[wi]\d{3,4}\b.*$|^info\b.*$/gm, // warnings
  /^.*setting omp_num_threads.*$|^nccl version.*$|^wandb\b.*$|\d+%\|.*?\]/gm]; // what healthy jobs print; a progress bar
const [PLAIN, EXIT, POINTER, WARNING, HEALTHY] = [0, 1, 1.5, 3, 4]; // the ranks of rows; 2: that something failed
const POINTS_UP = /(error|traceback).{0,40}\b(above|earlier)\b/i; // a row that sends the reader to an earlier error
const EVENT = /(?<!(error|exception|occurred): \s*)^.*(?<!original )traceback \(most recent|^\W?[ef]\d{3,4} /gm; // an error begins
const RAISED = /^\s*[\w.]*(error|exception|\.py: error)(: \S.*)?$/m; // Python's and argparse's last line
const WITH = /^ with (\S+: )?$/; // between two texts that the log must both have
const ANYTHING = /(…|\.{3}|"[^"]*"|\S*\/\S+|\S+\.pt\b|(?<!-|signal:? |errno: )\b\d[\d.:]*|\s+)/; // numbers, paths, ...
const PREFIX = /^(\d+: |[\w.-]+ +\| |\(\S+ pid=\S+\) |\d{4}-\d\d-\d\d[t ][\d:.,]+z? )|\[[a-z]*\d+\]: ?/gm; // srun, compose, Ray, a time; torch
const clean = (text) => text.toLowerCase().replace(/\x1b\[[\d;]*m/g, "").replace(PREFIX, "").replace(/ *: */g, ": ");

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

const search = (texts, text) => texts.flatMap(({ patterns }) => patterns.find(({ regexp }) => regexp.test(text)) ?? []);
const rows = Array.from(list.children, (row) => [row, [...row.firstChild.querySelectorAll("code")].reduce(quoted, [])]);

function find(text) { // the rows that fit, and the earliest exception that none of them explains
  const without = [text]; // all lines, without those of the last pattern of NO_CAUSE, without those of the last two, ...
  for (const lines of NO_CAUSE.toReversed()) without.unshift(without[0].replace(lines, (line) => " ".repeat(line.length)));
  const events = [...text.matchAll(EVENT)].map(({ index }) => index), hits = [];
  for (const [row, all] of rows) {
    const texts = all.filter(({ needs }) => needs.every((each) => each.test(text)));
    if (!search(texts, text).length) continue;
    const level = without.findIndex((some) => search(texts, some).length), found = search(texts, without[level]);
    const points = POINTS_UP.test(row.textContent), at = Math.min(...found.map(({ regexp }) => without[level].search(regexp)));
    hits.push({ row, texts, at, size: found.reduce((sum, { size }) => sum + size, 0), event: events.filter((begin) => begin <= at).length,
      rank: points ? Math.max(level, POINTER) : level, points, oneOf: row.textContent.includes("One of: ") });
  }
  hits.sort((a, b) => a.rank - b.rank || a.event - b.event || a.rank < POINTER && a.oneOf - b.oneOf || b.size - a.size || a.at - b.at);
  const own = [0, ...events].map((begin, event) => {
    const part = without[PLAIN].slice(begin, events[event]), at = part.search(RAISED);
    const explained = at < 0 || hits.some(({ texts }) => search(texts, part).length);
    return explained ? [] : { event, at: begin + at + part.slice(at).search(/\S/), raised: /^(?!.*-packages\b)\S+", line/.test(part.slice(0, at).split('file "').at(-1)) };
  }).flat()[0];
  return { hits, own, failed: /error|exception|fail/.test(without[EXIT + 1]), others: /\w/.test(without[HEALTHY - 1]) };
}

log.oninput = () => {
  const text = clean(log.value), { hits, own, failed, others } = find(text), [first] = hits;
  list.replaceChildren(...(first ? hits.map(({ row }) => row) : rows.map(([row]) => row)));
  const isOwn = own && !(first?.rank < POINTER && first.event <= own.event);
  nothing.hidden = !text.trim() || isOwn && own.raised || first && (first.oneOf || first.rank < WARNING && !first.points || (first.rank < HEALTHY ? !failed : !others));
  several.hidden = isOwn || !first?.oneOf;
  raised.hidden = !isOwn || !own.raised;
  excerpt.hidden = !first && !isOwn;
  const line = text.slice(0, isOwn ? own.at : first?.at ?? 0).split("\n").length, lines = log.value.split("\n");
  const cuts = [Math.max(line - 3, 0), line - 1, line, line + 2];
  [...excerpt.children].forEach((part, n) => part.textContent = lines.slice(cuts[n], cuts[n + 1]).join("\n") + "\n");
};
