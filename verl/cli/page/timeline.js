// All members over time, on a canvas: there may be a hundred thousand slices.
const ROW = 17;
const GAP = 10;
const AXIS = 22;
const STEPS_AT_FIRST = 20; // of a run of many steps, of which one is less than a pixel wide
const KINDS = {
  step: "--rest", gen: "--c1", generating: "--c1", old_log_prob: "--c2", ref: "--c2", values: "--c2", update_actor: "--c5", update_critic: "--c4",
  update_weights: "--c6", paused: "--c8", loading: "--c3", testing: "--c7",
};

const KIND_NAMES = {
  "generation": ["gen", "generating"], "log-probs, values": ["old_log_prob", "ref", "values"], "update of the policy": ["update_actor"],
  "update of the critic": ["update_critic"], "waits for a sync": ["update_weights"], "loading": ["loading"], "paused": ["paused"], "validation": ["testing"],
};

class TimelineView {
  constructor(canvas) {
    this.canvas = canvas;
    this.tracks = RUN.tracks.map((track) => this.laidOut(track));
    this.end = Math.max(1e-6, ...RUN.tracks.map((track) => track.slices.reduce((most, [, , stop]) => Math.max(most, stop), 0)));
    [this.from, this.to] = [0, this.end];
    this.pointers = new Map();
    onWidth(canvas.parentElement, (width) => { this.width = width; this.resize(); });
    repaint.push(() => this.draw());
    this.listen();
  }

  // The depth of each slice within those around it. Slices come in the order of their starts, outer ones first.
  laidOut({ group, name, slices }) {
    const around = [];
    let rows = 1;
    const placed = slices.map(([label, start, stop, version, about]) => {
      while (around.length && around[around.length - 1] <= start) around.pop();
      const depth = around.length;
      around.push(stop);
      rows = Math.max(rows, depth + 1);
      return { label: RUN.names[label], start, stop, version, about, depth };
    });
    return { group, name, slices: placed, rows };
  }

  resize() {
    this.labels = this.width < 600 ? 74 : 120;
    const height = AXIS + this.tracks.reduce((sum, track) => sum + track.rows * ROW + GAP, 0);
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.height = height;
    this.draw();
  }

  x(time) { return this.labels + ((time - this.from) / (this.to - this.from)) * (this.width - this.labels); }
  time(x) { return this.from + ((x - this.labels) / (this.width - this.labels)) * (this.to - this.from); }

  show(from, to) {
    const span = clamped(to - from, Math.min(1e-4, this.end), this.end);
    this.from = clamped(from, 0, this.end - span);
    this.to = this.from + span;
    if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  zoom(factor, at = (this.from + this.to) / 2) { this.show(at - (at - this.from) * factor, at + (this.to - at) * factor); }
  pan(part) { const by = (this.to - this.from) * part; this.show(this.from + by, this.to + by); }

  draw() {
    if (!this.context) return;
    const { context, width } = this;
    const fills = new Map();
    const fill = (name) => { if (!fills.has(name)) fills.set(name, colour(name)); return fills.get(name); };
    context.clearRect(0, 0, width, this.height);
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "middle";
    for (const value of ticks(this.from, this.to, (width - this.labels) / 110)) {
      const x = Math.round(this.x(value)) + 0.5;
      context.fillStyle = fill("--grid");
      context.fillRect(x, AXIS, 1, this.height - AXIS);
      context.fillStyle = fill("--quiet");
      context.textAlign = x > width - 40 ? "right" : x < this.labels + 12 ? "left" : "center";
      context.fillText(seconds(value), Math.min(x, width - 2), 9);
    }
    let top = AXIS;
    for (const track of this.tracks) {
      track.top = top;
      this.drawTrack(track, top, fill);
      top += track.rows * ROW + GAP;
    }
  }

  drawTrack(track, top, fill) {
    const { context, width } = this;
    context.fillStyle = fill("--grid");
    context.fillRect(0, top - GAP / 2, width, 1);
    const ends = [];
    context.textAlign = "left";
    for (const slice of track.slices) {
      if (slice.stop < this.from || slice.start > this.to) continue;
      const left = Math.max(this.x(slice.start), this.labels);
      const right = Math.min(Math.max(this.x(slice.stop), left + 1), width);
      if (right <= (ends[slice.depth] ?? -1)) continue; // would be drawn over what is there
      ends[slice.depth] = Math.floor(right);
      const y = top + slice.depth * ROW;
      context.fillStyle = fill(sliceColour(track, slice));
      context.fillRect(left, y, Math.max(right - left - (right - left > 4 ? 1 : 0), 1), ROW - 2);
      if (right - left > 26) {
        context.fillStyle = inkOn(fill(sliceColour(track, slice)));
        context.fillText(fitting(context, slice.label, right - left - 6), left + 3, y + ROW / 2);
      }
    }
    context.fillStyle = fill("--card");
    context.fillRect(0, top, this.labels - 4, track.rows * ROW);
    context.fillStyle = fill("--ink");
    context.fillText(fitting(context, track.name, this.labels - 10), 0, top + ROW / 2 - 1);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const track = this.tracks.find((each) => y >= each.top && y < each.top + each.rows * ROW);
    if (!track || x < this.labels) return null;
    const depth = Math.floor((y - track.top) / ROW);
    const near = (this.time(x + 2) - this.time(x)) || 0;
    const time = this.time(x);
    const found = track.slices.filter((slice) => slice.depth === depth && slice.start - near <= time && time <= slice.stop + near);
    const slice = found.sort((one, two) => Math.abs(one.start + one.stop - 2 * time) - Math.abs(two.start + two.stop - 2 * time))[0];
    return slice ? { track, slice } : null;
  }

  listen() {
    const { canvas, pointers } = this;
    canvas.addEventListener("wheel", (event) => {
      const box = canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.zoom(Math.exp(clamped(event.deltaY, -120, 120) / 300), this.time(event.clientX - box.left)); }
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) { event.preventDefault(); this.pan((event.deltaX || event.deltaY) / this.width); }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, event); hideTip(); });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("dblclick", (event) => { const hit = this.at(event); if (hit) this.focus(hit.slice.start, hit.slice.stop); });
    canvas.addEventListener("keydown", (event) => {
      const act = { w: () => this.zoom(0.7), s: () => this.zoom(1.4), a: () => this.pan(-0.2), d: () => this.pan(0.2), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.7), "-": () => this.zoom(1.4), 0: () => this.show(0, this.end) }[event.key];
      if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
    });
  }

  moved(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      const hit = this.at(event);
      this.canvas.style.cursor = hit ? "pointer" : "";
      if (hit) showTip(event, hit.slice.label, aboutSlice(hit));
      else hideTip();
      return;
    }
    const others = [...this.pointers.values()].filter((each) => each.pointerId !== event.pointerId);
    this.pointers.set(event.pointerId, event);
    if (others.length) {
      const apart = (one) => Math.max(Math.abs(one.clientX - others[0].clientX), 8);
      const middle = (event.clientX + others[0].clientX) / 2 - this.canvas.getBoundingClientRect().left;
      this.zoom(apart(before) / apart(event), this.time(middle));
    } else this.pan((before.clientX - event.clientX) / (this.width - this.labels));
  }

  focus(start, stop) {
    const around = Math.max((stop - start) * 0.15, 1e-4);
    this.show(start - around, stop + around);
  }
}

// Black or white, whichever is read better on `background`, like #2a78d6.
function inkOn(background) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(background.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.25 ? "#16181d" : "#ffffff";
}

function sliceColour(track, slice) {
  if (track.group === "members") return PHASE_COLOURS[slice.label] || "--rest";
  if (track.group !== "syncs") return KINDS[slice.label] || PHASE_COLOURS[slice.label] || "--rest";
  return slice.depth === 0 && !PHASE_COLOURS[slice.label] ? (slice.about && slice.about.outcome === "aborted" ? "--c8" : "--rest") : PHASE_COLOURS[slice.label] || "--rest";
}

function aboutSlice({ track, slice }) {
  const lines = [track.name, seconds(slice.stop - slice.start), `from ${seconds(slice.start)}`];
  if (slice.version !== null) lines.push(`${track.group === "trainer" ? "step" : "version"} ${slice.version}`);
  for (const [name, value] of Object.entries(slice.about || {})) if (value !== null && value !== "") lines.push(`${name}: ${typeof value === "number" ? brief(value) : value}`);
  return lines;
}

function fitting(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  for (let length = text.length - 1; length > 1; length--) {
    const part = `${text.slice(0, length)}…`;
    if (context.measureText(part).width <= room) return part;
  }
  return "";
}

function timelineSection() {
  if (!RUN.tracks.some((track) => track.slices.length)) return null;
  const node = section("timeline", "Timeline");
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "what every member did when" });
  const holder = el("div", {}, canvas);
  const step = el("input", { type: "number", min: 0, style: "width: 5.5rem", placeholder: "step", "aria-label": "go to a step" });
  const bar = el("div", { class: "bar" });
  const names = new Set(RUN.tracks.filter((track) => track.group === "trainer" || track.group === "replicas").flatMap((track) => track.slices.map(([name]) => RUN.names[name])));
  const kinds = Object.entries(KIND_NAMES).filter(([, own]) => own.some((name) => names.has(name)));
  const leftOut = RUN.tracks_left_out ? el("p", { class: "hint" }, `${RUN.tracks_left_out} more tracks, of those that were busy least, are in the file of verl-sync trace`) : null;
  node.append(el("div", { class: "card" }, bar, holder, leftOut,
    legend(kinds.map(([name, own]) => [name, KINDS[own[0]]]), "trainer, replicas"), legend(Object.entries(PHASE_COLOURS), "syncs, ranks, nodes")));
  const view = new TimelineView(canvas);
  const act = (text, title, run) => el("button", { type: "button", title, onclick: run }, text);
  bar.append(
    act("+", "zoom in", () => view.zoom(0.5)), act("−", "zoom out", () => view.zoom(2)), act("‹", "earlier", () => view.pan(-0.5)),
    act("›", "later", () => view.pan(0.5)), act("all", "the whole run", () => view.show(0, view.end)), step,
    el("span", { class: "hint" }, "drag to move; Ctrl and the wheel, or two fingers, to zoom; double-click a slice to fill the width with it; keys w, s, a, d"),
  );
  const steps = view.tracks.filter((track) => track.group === "trainer").flatMap((track) => track.slices).filter((slice) => slice.label === "step");
  if (steps.length > 3 * STEPS_AT_FIRST) view.show(steps.at(-STEPS_AT_FIRST).start, view.end);
  step.addEventListener("change", () => {
    const slices = view.tracks.flatMap((track) => track.slices).filter((slice) => slice.version === Number(step.value));
    if (slices.length) view.focus(Math.min(...slices.map((slice) => slice.start)), Math.max(...slices.map((slice) => slice.stop)));
  });
  return view;
}
