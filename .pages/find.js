// The rows whose quoted texts occur in a log: first those of its earliest error, and of them those with the longest texts
const [log, list, nothing, several, raised, excerpt] = ["log", "rows", "nothing", "several", "raised", "excerpt"].map((id) => document.getElementById(id));
const NO_CAUSE = [ // lines, or parts of lines, that choose a row only if nothing does but what is here and below
  /^.*(exitcode|received by pid).*$/gm, // how a process ended
  // that something failed: torchrun, Slurm, NCCL's watchdog, a stack of C++
  /^frame #.*$|^.*(childfailederror|error_file|(closing|death|got) signal|exited with exit code|terminating stepid).*$|process group watchdog.*exception: /gm,
  /^.*(warning|training on the 1,797 bundled digits).*$|^\W?[wi]\d{3,4}\b.*$|^info\b.*$/gm, // warnings
  /^.*destroy_process_group\(\) was not called.*$/gm,
  // what healthy jobs print: torchrun's banner, NCCL's version, W&B, a progress bar
  /^.*(setting omp_num_threads|\*{9}|distributed\/run\.py: \d+\]|^nccl version|nccl info (nccl version|.*closed by localrank)|^wandb).*$|\d+%\|.*?\]/gm];
const [POINTER, WARNING, HEALTHY] = [1.5, 3, 5]; // the rank of a row is how many of NO_CAUSE its lines need, but at least
const POINTS_UP = /(error|traceback).{0,40}\b(above|earlier)\b/i; // POINTER, if it sends the reader to an earlier error
const HARMLESS = /\b(only a warning|harmless)\b/; // WARNING
const EVENT = /(?<!(error|exception|occurred): \s*)^.*(?<!original )traceback \(most recent|^\W?[ef]\d{3,4} /gm; // an error begins
const RAISED = /^ *([\w.]*[a-z\d.](error|exception)|[\w.-]+\.py: error|what\(\))(: \S.*)?$/m; // of Python, argparse, C++
const WITH = /^ with (\S+: )?$/; // between two texts that the log must both have
const ANYTHING = /(…|\.{3}|(?<!-|signal:? |errno:? )\b\d[\d.:]*|\s+)/; // what differs: numbers, ...
const PREFIX = /^( *\d+: |[\w.-]+ +\| |\(\S+ pid=\S+\) |\d{4}-\d\d-\d\d[t ][\d:.,]+z? )|\[[a-z]*\d+\]: ?/gm; // srun, compose, Ray, a time; torch
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

function find(text) { // the rows that fit, with the cause before all others
  const without = [text]; // the log without all NO_CAUSE, ..., without the last of them, and whole
  for (const lines of NO_CAUSE.toReversed()) without.unshift(without[0].replace(lines, (line) => " ".repeat(line.length)));
  const events = [0, ...Array.from(text.matchAll(EVENT), ({ index }) => index)], hits = [];
  for (const [row, all] of rows) {
    const texts = all.filter(({ needs }) => needs.every((each) => each.test(text)));
    if (!search(texts, text).length) continue;
    const level = without.findIndex((some) => search(texts, some).length), found = search(texts, without[level]);
    const at = Math.min(...found.map(({ regexp }) => without[level].search(regexp)));
    const words = row.textContent, points = POINTS_UP.test(words), oneOf = words.includes("One of: ");
    const rank = Math.max(level, points ? POINTER : HARMLESS.test(words) ? WARNING : 0);
    hits.push({ row, texts, at, level, points, oneOf, rank,
      event: events.findLastIndex((begin) => begin <= at), size: found.reduce((sum, { size }) => sum + size, 0) });
  }
  hits.sort((a, b) => a.rank - b.rank || a.event - b.event || a.rank < POINTER && a.oneOf - b.oneOf || b.size - a.size || a.at - b.at);
  return { hits, without, events };
}

function unexplained({ hits, without, events }) { // an exception before the cause, and no row has its text
  for (const [event, begin] of events.entries()) {
    if (hits[0]?.rank < POINTER && hits[0].event <= event) return;
    const part = without[0].slice(begin, events[event + 1]), exception = RAISED.exec(part);
    if (!exception || hits.some(({ points, texts }) => search(texts, points ? exception[0] : part).length)) continue;
    const frame = part.slice(0, exception.index).split('file "').at(-1); // the innermost one
    return { at: begin + exception.index, raised: /^[^"]+", line/.test(frame) && !/^[^"]*-packages\b/.test(frame) };
  }
}

log.oninput = () => {
  const text = clean(log.value), found = find(text), [first] = found.hits;
  const own = unexplained(found);
  const isCause = first && (first.level < WARNING ? first.oneOf || !first.points // or all that the log has
    : first.level < HEALTHY ? !/error|exception|fail/.test(found.without[WARNING - 1]) : !/\w/.test(found.without[HEALTHY - 1]));
  list.replaceChildren(...(first ? found.hits.map(({ row }) => row) : rows.map(([row]) => row)));
  raised.hidden = !own?.raised;
  nothing.hidden = !text.trim() || own?.raised || !own && isCause;
  several.hidden = own || !isCause || !first.oneOf;
  excerpt.hidden = !own && !first;
  const line = text.slice(0, (own || first)?.at).split("\n").length, lines = log.value.split("\n");
  const cuts = [Math.max(line - 3, 0), line - 1, line, line + 2];
  [...excerpt.children].forEach((part, n) => part.textContent = lines.slice(cuts[n], cuts[n + 1]).join("\n") + "\n");
};
