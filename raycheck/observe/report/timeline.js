// The timeline: phases, snapshots, uploads, commits and what happened to the job, on one axis of time.
//
// Whatever the number of events, the drawing has one path for each kind of sign. Signs that would
// lie on one another become one; where attempts are crowded, bars show how many there are.

function makeTimeline(data) {
  const SVG = "http://www.w3.org/2000/svg";
  const LANES = { phases: 24, snapshots: 78, uploads: 114, commits: 150, job: 186 };
  const NAMES = { snapshots: "Snapshots", uploads: "Uploads", commits: "Commits", job: "The job" };
  const LANE_HEIGHT = 18, HEIGHT = 258, MARGIN = 10, BIN = 4, SPACING = 13;
  const SHORTEST_S = Math.min(0.02, data.length);
  const STEPS_S = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600,
    7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000, 8640000, 86400000];
  const SHAPES = {
    failure: (x, y) => `M${x - 6} ${y - 6}h12l-6 11z`,
    resize: (x, y) => `M${x} ${y - 7}l6 7l-6 7l-6 -7z`,
    other: (x, y) => `M${x - 5} ${y - 5}h10v10h-10z`,
    restored: (x, y) => `M${x - 6} ${y + 6}h12l-6 -11z`,
  };
  const HINT = "Point at a sign of the lower rows, or press N in the timeline, to read what it was.";

  const view = byId("timeline-view"), readout = byId("timeline-readout");
  const spansOf = data.generations.map(() => []);
  for (const span of data.phases) spansOf[span[3]].push(span);
  const longest = data.attempts.reduce((most, [began, , ended]) => Math.max(most, ended - began), 0);
  const items = [
    ...data.attempts.map((attempt) => ({ at: attempt[attempt[3] ? 2 : 0], lane: "commits", text: () => attemptText(attempt) })),
    ...data.marks.map(([at, , text]) => ({ at, lane: "job", text: () => text })),
  ].sort((a, b) => a.at - b.at);
  let from = 0, length = data.length, selected = -1, isPlanned = false;

  function attemptText([began, , ended, isCommitted, step, reason]) {
    const lasted = `${(ended - began).toFixed(2)} s after its snapshot began`;
    return `step ${countText(step)} ` + (isCommitted ? `committed, ${lasted}` : `given up${ended > began ? `, ${lasted}` : ""}: ${reason}`);
  }

  // From seconds to pixels and back, and where to look.

  const width = () => Math.max(view.clientWidth, 200);
  const pixel = (seconds) => MARGIN + (seconds - from) / length * (width() - 2 * MARGIN);
  const secondsAt = (x) => from + (x - MARGIN) / (width() - 2 * MARGIN) * length;

  function show(newFrom, newLength) {
    length = Math.min(Math.max(newLength, SHORTEST_S), data.length);
    from = Math.min(Math.max(newFrom, 0), data.length - length);
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(() => { isPlanned = false; draw(); });
  }

  function zoom(factor, x) {
    const at = x === undefined ? from + length / 2 : secondsAt(x);
    const newLength = Math.min(Math.max(length * factor, SHORTEST_S), data.length);
    show(at - (at - from) * newLength / length, newLength);
  }

  const move = (share) => show(from + share * length, length);

  // Drawing.

  function make(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  class Paths {
    constructor() { this.paths = new Map(); this.ends = new Map(); this.isMerged = false; }

    add(kind, d) { this.paths.set(kind, (this.paths.get(kind) || "") + d); }

    box(kind, begin, end, y, height) {
      if (end < from || begin > from + length) return;
      const left = Math.max(pixel(begin), 0), right = Math.max(Math.min(pixel(end), width()), left + 1.5);
      const key = kind + y, start = Math.max(left, this.ends.get(key) || 0);
      if (right <= start) return;
      this.ends.set(key, right);
      this.add(kind, `M${start.toFixed(1)} ${y}H${right.toFixed(1)}v${height}H${start.toFixed(1)}z`);
    }

    sign(kind, at, spacing, shape) {
      const x = Math.round(pixel(at));
      if (x < -8 || x > width() + 8) return;
      if (x - (this.ends.get(kind) ?? -99) < spacing) { this.isMerged = true; return; }
      this.ends.set(kind, x);
      this.add(kind, shape(x));
    }

    into(svg) { for (const [kind, d] of this.paths) svg.append(make("path", { class: kind, d })); }
  }

  function visibleAttempts() {
    let low = 0, high = data.attempts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.attempts[middle][2] < from) low = middle + 1; else high = middle;
    }
    let end = low;
    while (end < data.attempts.length && data.attempts[end][2] - longest <= from + length) end++;
    return [low, end];
  }

  function drawAttempts(paths, first, end) {
    for (let index = first; index < end; index++) {
      const [began, staged, ended, isCommitted] = data.attempts[index];
      paths.box("is-stall", began, staged, LANES.snapshots, 14);
      paths.box(isCommitted ? "is-persist" : "is-persist given-up", staged, ended, LANES.uploads + (index % 2) * 9, 8);
      if (isCommitted) paths.sign("is-commit", ended, 1, (x) => `M${x - 0.5} ${LANES.commits}v14`);
      else paths.sign("is-given-up", began, SPACING, (x) => `M${x - 5} ${LANES.commits + 2}l10 10m0 -10l-10 10`);
    }
  }

  // Bars of some pixels: time stalled and uploading, and how many were committed and given up.
  function drawCrowd(paths, first, end) {
    const bins = Array.from({ length: Math.ceil(width() / BIN) }, () => ({ stall: 0, upload: 0, committed: 0, givenUp: 0 }));
    for (let index = first; index < end; index++) {
      const [began, staged, ended, isCommitted] = data.attempts[index];
      const bin = bins[Math.floor(pixel(isCommitted ? ended : began) / BIN)];
      if (!bin) continue;
      bin.stall += staged - began;
      bin.upload += ended - staged;
      bin[isCommitted ? "committed" : "givenUp"] += 1;
    }
    const drawBars = (kind, y, valueOf, baseOf, most) => bins.forEach((bin, index) => {
      const base = Math.round(LANE_HEIGHT * Math.min(baseOf(bin) / most, 1)), value = valueOf(bin);
      const height = value ? Math.max(Math.round(LANE_HEIGHT * Math.min(value / most, 1)), 1) : 0;
      if (height) paths.add(kind, `M${index * BIN} ${y + LANE_HEIGHT - base}v${-height}h${BIN - 0.5}v${height}z`);
    });
    const none = () => 0, most = (valueOf) => bins.reduce((high, bin) => Math.max(high, valueOf(bin)), 1e-9);
    const all = most((bin) => bin.committed + bin.givenUp);
    drawBars("is-stall", LANES.snapshots, (bin) => bin.stall, none, most((bin) => bin.stall));
    drawBars("is-persist", LANES.uploads, (bin) => bin.upload, none, most((bin) => bin.upload));
    drawBars("is-commit bar", LANES.commits, (bin) => bin.committed, none, all);
    drawBars("is-given-up bar", LANES.commits, (bin) => bin.givenUp, (bin) => bin.committed, all);
  }

  function draw() {
    const svg = make("svg", { viewBox: `0 0 ${width()} ${HEIGHT}`, width: width(), height: HEIGHT, "aria-hidden": "true" });
    svg.append(hatch("hatch-again", "again", 45), hatch("hatch-down", "down", -45));
    const paths = new Paths(), [first, end] = visibleAttempts(), isCrowded = end - first > width() / 5;
    for (const [begin, until, phase] of data.phases) paths.box(`is-${phase}`, begin, until, LANES.phases, 26);
    (isCrowded ? drawCrowd : drawAttempts)(paths, first, end);
    for (const [at, sort] of data.marks) {
      const shape = sort in SHAPES ? sort : "other", y = LANES.job + (shape === "restored" ? 26 : 8);
      paths.sign(`is-${shape}`, at, SPACING, (x) => SHAPES[shape](x, y));
    }
    paths.into(svg);
    for (const name in NAMES) {
      const note = isCrowded && name !== "job" ? { snapshots: ": time", uploads: ": time", commits: ": number, given up on top" }[name] : "";
      svg.append(make("text", { class: "lane", x: MARGIN, y: LANES[name] - 4 }, NAMES[name] + note));
    }
    if (isCrowded || paths.isMerged) svg.append(make("text", { class: "lane", x: width() - MARGIN, y: LANES.phases - 8, "text-anchor": "end" }, "zoom in for single events"));
    labelPhases(svg, isCrowded || paths.isMerged ? 150 : 0);
    drawTicks(svg);
    if (selected >= 0) {
      const x = pixel(items[selected].at);
      svg.append(make("line", { class: "cursor", x1: x, x2: x, y1: LANES.phases - 4, y2: HEIGHT - 24 }));
    }
    view.replaceChildren(svg);
    const isAll = length >= data.length;
    for (const [name, isEnd] of [["in", length <= SHORTEST_S], ["out", isAll], ["all", isAll], ["left", from <= 0], ["right", from + length >= data.length]]) {
      document.querySelector(`[data-do=${name}]`).disabled = isEnd;
    }
  }

  function hatch(id, colour, angle) {
    const pattern = make("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` });
    pattern.append(make("rect", { width: 6, height: 6, fill: "var(--raised)" }), make("rect", { width: 3, height: 6, fill: `var(--${colour})` }));
    return pattern;
  }

  function labelPhases(svg, reserved) {
    let free = -1;
    data.generations.forEach(([name, numWorkers], index) => {
      const spans = spansOf[index];
      if (!spans.length) return;
      const left = Math.max(pixel(spans[0][0]), 2), right = Math.min(pixel(spans[spans.length - 1][1]), width() - reserved);
      const long = `${name}, ${countText(numWorkers)} worker${numWorkers === 1 ? "" : "s"}`;
      const text = [long, name].find((candidate) => candidate.length * 6.6 + 6 < right - left);
      if (!text || left < free) return;
      free = left + text.length * 6.6 + 8;
      svg.append(make("text", { x: left + 2, y: LANES.phases - 8 }, text));
    });
  }

  function drawTicks(svg) {
    const most = Math.max(Math.floor(width() / 95), 2), y = HEIGHT - 22;
    const step = STEPS_S.find((seconds) => length / seconds <= most) || length / most;
    svg.append(make("line", { class: "axis", x1: 0, x2: width(), y1: y, y2: y }));
    for (let i = Math.ceil(from / step); i * step <= from + length; i++) {
      const x = pixel(i * step), anchor = x < 24 ? "start" : x > width() - 24 ? "end" : "middle";
      svg.append(make("line", { class: "axis", x1: x, x2: x, y1: y, y2: y + 5 }));
      svg.append(make("text", { class: "tick", x, y: HEIGHT - 5, "text-anchor": anchor }, tickText(i * step, step)));
    }
  }

  // Which sign is meant: the nearest to the pointer, or the next one in time.

  function select(index) {
    selected = index;
    readout.textContent = index < 0 ? HINT : `${afterText(items[index].at)}: ${items[index].text()}`;
    const isOutside = index >= 0 && (items[index].at < from || items[index].at > from + length);
    show(isOutside ? items[index].at - length / 2 : from, length);
  }

  function firstAfter(seconds) {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (items[middle].at <= seconds) low = middle + 1; else high = middle;
    }
    return low;
  }

  function nearest(x, y) {
    const lane = y > LANES.job - 12 ? "job" : "commits", middle = firstAfter(secondsAt(x));
    const distance = (index) => Math.abs(pixel(items[index].at) - x);
    let best = -1;
    for (const direction of [1, -1]) {
      for (let i = direction > 0 ? middle : middle - 1; i >= 0 && i < items.length && distance(i) <= 12; i += direction) {
        if (items[i].lane !== lane) continue;
        if (best < 0 || distance(i) < distance(best)) best = i;
        break;
      }
    }
    return best;
  }

  function step(direction) {
    if (!items.length) return;
    const next = selected >= 0 ? selected + direction : direction > 0 ? firstAfter(from - 1e-9) : firstAfter(from + length) - 1;
    select(Math.min(Math.max(next, 0), items.length - 1));
  }

  // Keyboard, buttons, wheel, mouse and fingers.

  const actions = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25), all: () => show(0, data.length) };
  const keys = { "+": actions.in, "=": actions.in, "-": actions.out, ArrowLeft: actions.left, ArrowRight: actions.right, Home: actions.all,
    0: actions.all, n: () => step(1), N: () => step(1), p: () => step(-1), P: () => step(-1), Escape: () => select(-1) };
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("timeline-tools").addEventListener("click", ({ target }) => { if (target.dataset.do) actions[target.dataset.do](); });
  const xOf = (event) => event.clientX - view.getBoundingClientRect().left;
  view.addEventListener("wheel", (event) => {
    const isAcross = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !isAcross) return; // the page's own scrolling
    event.preventDefault();
    if (isAcross && !event.ctrlKey) move((event.deltaX || event.deltaY) / width());
    else zoom(Math.exp(event.deltaY / 200), xOf(event));
  }, { passive: false });
  view.addEventListener("dblclick", (event) => zoom(0.4, xOf(event)));

  const pointers = new Map();
  let travelled = 0;
  view.addEventListener("pointerdown", (event) => {
    travelled = 0;
    pointers.set(event.pointerId, event.clientX);
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      const found = nearest(xOf(event), event.clientY - view.getBoundingClientRect().top);
      if (found >= 0 && found !== selected) select(found);
      return;
    }
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.clientX);
    const after = [...pointers.values()], apart = ([one, other]) => Math.max(Math.abs(one - other), 10);
    travelled += Math.abs(after[0] - before[0]);
    if (before.length === 1) show(from - (after[0] - before[0]) / (width() - 2 * MARGIN) * length, length);
    else zoom(apart(before) / apart(after), (after[0] + after[1]) / 2 - view.getBoundingClientRect().left);
  });
  view.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (travelled < 5) select(nearest(xOf(event), event.clientY - view.getBoundingClientRect().top));
  });
  view.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));

  new ResizeObserver(() => show(from, length)).observe(view);
  byId("timeline-tools").hidden = false;
  readout.textContent = HINT;
  draw();
}
