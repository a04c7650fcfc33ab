// Curves of metrics over steps, and the parts of every step as stacked bars.
const HEIGHT = 150;
const PAD = { left: 46, right: 10, top: 10, bottom: 20 };

// What all curves are drawn with: steps, or the hours since the run began, and the mean of so many values.
const axis = { hours: false, smooth: 1 };

// Of one metric, a line for every run that has it.
function linesOf(name) {
  const runs = RUN.runs || [{ name, series: RUN.metrics.series }];
  return runs.map((run, index) => ({ name: run.name, values: run.series[name], fill: `--c${(index % 8) + 1}` })).filter(({ values }) => values);
}

function curveCard(name) {
  const lines = linesOf(name);
  const last = lines.map(({ values }) => brief(values.findLast((value) => value !== null))).join(", ");
  return curvesCard(name, `last ${last}`, lines);
}

// One chart as wide as the page: the score in training, and the held-out ones.
function largeCard(names) {
  const lines = names.flatMap((name) => linesOf(name).map((line) => ({ ...line, name: RUN.runs ? `${line.name}: ${name}` : name })));
  return curvesCard("Score", "", lines.map((line, index) => ({ ...line, fill: `--c${(index % 8) + 1}` })), 280);
}

function smoothed(values, count) {
  if (count < 2) return values;
  return values.map((value, index) => {
    const near = values.slice(Math.max(0, index - count + 1), index + 1).filter((each) => each !== null);
    return value === null ? null : near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}

// `lines` are `{ name, values, fill }`, of which more than one get a legend.
function curvesCard(title, beside, lines, height = HEIGHT) {
  const holder = el("div", {});
  let drawn = 0;
  const draw = (width) => {
    drawn = width;
    const hours = axis.hours ? RUN.metrics.seconds.map((value) => (value === null ? null : value / 3600)) : null;
    const own = lines.map((line) => ({ ...line, values: smoothed(line.values, axis.smooth) }));
    holder.replaceChildren(curves(title, RUN.metrics.steps, own, width, height, hours));
  };
  onWidth(holder, draw);
  redraw.push(() => { if (drawn && holder.isConnected) draw(drawn); });
  const head = el("div", { class: "chart-head" }, el("h3", {}, title.replace(/([/_])/g, "$1\u200b")), el("span", {}, beside));
  return el("div", { class: "card" }, head, holder, lines.length > 1 ? legend(lines.map(({ name, fill }) => [name, fill])) : null);
}

const redraw = [];

function curves(title, numbers, lines, width, height, hours) {
  const steps = hours || numbers;
  if (hours) lines = lines.map((line) => ({ ...line, values: line.values.map((value, index) => (hours[index] === null ? null : value)) }));
  const known = lines.flatMap(({ values }) => values.filter((value) => value !== null));
  let low = known.reduce((least, value) => Math.min(least, value), Infinity);
  let high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  const constant = known.every((value) => value === known[0]);
  const [first, last] = [steps[0], Math.max(steps[steps.length - 1], steps[0] + (hours ? 1e-6 : 1))];
  const x = (step) => PAD.left + ((step - first) / (last - first)) * (width - PAD.left - PAD.right);
  const y = (value) => PAD.top + ((high - value) / (high - low)) * (height - PAD.top - PAD.bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title} per ${hours ? "hour" : "step"}` });
  drawAxes(picture, x, y, { range: [first, last], values: constant ? [known[0]] : ticks(low, high, height > HEIGHT ? 6 : 3), width, height, hours });
  for (const step of RUN.metrics.saved) {
    const at = steps[numbers.indexOf(step)];
    if (at !== undefined && at !== null) picture.append(svg("path", { class: "saved", d: `M${x(at).toFixed(1)},${height - PAD.bottom} l-4,-7 h8 z` }, svg("title", {}, `checkpoint of step ${step}`)));
  }
  for (const { values, fill } of lines) {
    for (const part of unbroken(steps, values)) {
      const line = part.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("");
      picture.append(svg("path", { class: "curve", d: line, style: `stroke: var(${fill})` }));
      if (part.length === 1) picture.append(svg("circle", { cx: x(part[0][0]), cy: y(part[0][1]), r: 2.5, style: `fill: var(${fill})` }));
    }
  }
  const cursor = svg("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
  picture.append(cursor);
  const measured = steps.map((step, index) => [step, index]).filter(([, index]) => lines.some(({ values }) => values[index] !== null));
  picture.addEventListener("pointermove", (event) => {
    const wanted = first + ((event.clientX - picture.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) * (last - first);
    const [step, index] = measured.reduce((best, each) => (Math.abs(each[0] - wanted) < Math.abs(best[0] - wanted) ? each : best));
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("transform", `translate(${x(step)},0)`);
    showTip(event, title, [`step ${numbers[index]}${hours ? `, ${seconds(step * 3600)}` : ""}`, ...lines.map(({ name, values }) => `${lines.length > 1 ? `${name}: ` : ""}${brief(values[index])}`)]);
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  return picture;
}

// Where a value is missing the curve is broken, unless it is measured now and then only, as held-out rewards are.
function unbroken(steps, values) {
  const parts = [[]];
  values.forEach((value, index) => {
    if (value !== null) parts[parts.length - 1].push([steps[index], value]);
    else if (parts[parts.length - 1].length) parts.push([]);
  });
  const found = parts.filter((part) => part.length);
  const count = found.reduce((sum, part) => sum + part.length, 0);
  return found.length > 1 && found.length - 1 >= count / 4 ? [found.flat()] : found;
}

function drawAxes(picture, x, y, { range: [first, last], values, width, height, hours }) {
  for (const value of values) {
    picture.append(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, markText(value, values)));
  }
  const marks = ticks(first, last, clamped(width / 90, 2, 10)).filter((each) => hours || Number.isInteger(each));
  for (const each of marks) {
    picture.append(svg("text", { x: x(each), y: height - 5, "text-anchor": "middle" }, hours ? seconds(each * 3600) : String(each)));
  }
  picture.append(svg("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: height - PAD.bottom, y2: height - PAD.bottom }));
}

// With as many digits as tell one mark from the next.
function markText(value, marks) {
  if (marks.length < 2) return brief(value);
  const stride = marks[1] - marks[0];
  const digits = Math.max(0, -Math.floor(Math.log10(stride || 1) + 1e-9));
  return Math.abs(value) >= 1e4 || digits > 4 ? brief(value) : value.toFixed(digits);
}

function metricsSection() {
  const names = [...new Set((RUN.runs || [RUN.metrics]).flatMap(({ series }) => Object.keys(series)))];
  if (!names.length) return;
  const { large, first } = RUN.metrics;
  const node = section("metrics", "Reward and metrics", RUN.metrics.saved.length ? "Triangles on an axis are checkpoints." : null);
  node.append(axisBar());
  if (large.length) node.append(largeCard(large));
  node.append(el("div", { class: "charts", style: "margin-top: .75rem" }, first.map(curveCard)));
  const isConstant = (name) => new Set(linesOf(name).flatMap(({ values }) => values.filter((value) => value !== null))).size < 2;
  const rest = names.filter((name) => !first.includes(name) && !large.includes(name)).sort();
  const constants = rest.filter(isConstant);
  const others = rest.filter((name) => !constants.includes(name));
  if (others.length) node.append(otherMetrics(others));
  if (constants.length) {
    const rows = constants.flatMap((name) => [el("dt", {}, name), el("dd", {}, brief(linesOf(name)[0].values.find((value) => value !== null)))]);
    node.append(el("details", { style: "margin-top: .75rem", id: "constants" }, el("summary", {}, `${constants.length} metrics that never change`), el("dl", {}, rows)));
  }
}

function axisBar() {
  const change = () => redraw.forEach((each) => each());
  const smooth = el("select", { "aria-label": "smoothing" }, [1, 5, 20, 100].map((count) => el("option", { value: count }, count === 1 ? "as measured" : `mean of ${count} steps`)));
  smooth.value = axis.smooth;
  smooth.addEventListener("change", () => { axis.smooth = Number(smooth.value); change(); });
  const along = el("select", { "aria-label": "axis" }, el("option", { value: "steps" }, "over steps"), el("option", { value: "hours" }, "over time"));
  along.value = axis.hours ? "hours" : "steps";
  along.addEventListener("change", () => { axis.hours = along.value === "hours"; change(); });
  return el("div", { class: "bar" }, smooth, (RUN.metrics.seconds || []).length ? along : null);
}

// Behind a summary, by the first part of their names, and searched by a part of them.
function otherMetrics(others) {
  const found = el("div", { class: "charts" });
  const groups = [...new Set(others.map((name) => name.split("/")[0]))];
  const group = el("select", { "aria-label": "which metrics" }, el("option", { value: "" }, "all groups"), groups.map((each) => el("option", {}, each)));
  const search = el("input", { type: "search", placeholder: "part of a name", "aria-label": "part of a metric's name" });
  const count = el("span", { class: "hint" });
  const look = () => {
    const matching = others.filter((name) => name.includes(search.value.trim()) && (!group.value || name.split("/")[0] === group.value));
    found.replaceChildren(...matching.slice(0, 24).map(curveCard));
    drawAll();
    count.textContent = matching.length > 24 ? `the first 24 of ${matching.length}` : plural(matching.length, "metric");
  };
  search.addEventListener("input", look);
  group.addEventListener("change", look);
  const more = el("details", { style: "margin-top: .75rem" }, el("summary", {}, `${others.length} more metrics`), el("div", { class: "bar", style: "margin-top: .6rem" }, group, search, count), found);
  more.addEventListener("toggle", () => { if (more.open && !found.childElementCount) look(); });
  return more;
}

function legend(parts, title) {
  return el("ul", { class: "legend" }, title ? el("li", {}, `${title}:`) : null, parts.map(([name, fill]) => el("li", {}, el("i", { style: `background: var(${fill})` }), name)));
}

function breakdownSection() {
  const { steps, parts } = RUN.breakdown;
  if (!steps.length) return;
  const node = section("steps", "Where the time of a step goes", "Seconds of each part, as the trainer waited for it. Where there are more steps than columns, a column is the mean of several.");
  const holder = el("div", {});
  onWidth(holder, (width) => holder.replaceChildren(stacked(steps, parts, width)));
  node.append(el("div", { class: "card" }, holder, legend(parts.map(({ name, colour: fill }) => [name, fill]))));
}

function stacked(steps, parts, width) {
  const height = 230;
  const inner = width - PAD.left - PAD.right;
  const size = Math.ceil(steps.length / Math.max(Math.floor(inner / 5), 1));
  const columns = [];
  for (let at = 0; at < steps.length; at += size) {
    const own = steps.slice(at, at + size);
    const heights = parts.map(({ seconds: all }) => all.slice(at, at + size).reduce((sum, value) => sum + value, 0) / own.length);
    columns.push({ label: own.length > 1 ? `steps ${own[0]} to ${own[own.length - 1]}` : `step ${own[0]}`, first: own[0], heights, total: heights.reduce((sum, value) => sum + value, 0) });
  }
  const top = Math.max(...columns.map((column) => column.total)) || 1;
  const y = (value) => PAD.top + (1 - value / top) * (height - PAD.top - PAD.bottom);
  const stride = inner / columns.length;
  const wide = Math.min(Math.max(stride - (stride > 4 ? 2 : 0.5), 1), 46);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "seconds of each part of every step" });
  for (const value of ticks(0, top, 4)) {
    picture.append(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, seconds(value)));
  }
  columns.forEach((column, index) => {
    const left = PAD.left + index * stride + (stride - wide) / 2;
    const group = svg("g", {});
    let below = 0;
    column.heights.forEach((value, part) => {
      if (value > 0) group.append(svg("rect", { x: left, width: wide, y: y(below + value), height: Math.max(y(below) - y(below + value), 0.3), style: `fill: var(${parts[part].colour})` }));
      below += value;
    });
    group.append(svg("rect", { x: PAD.left + index * stride, width: stride, y: PAD.top, height: height - PAD.top - PAD.bottom, fill: "transparent" }));
    group.addEventListener("pointermove", (event) => showTip(event, `${column.label}: ${seconds(column.total)}`, parts.map(({ name }, part) => (column.heights[part] > 0 ? `${name}: ${seconds(column.heights[part])}` : ""))));
    group.addEventListener("pointerleave", hideTip);
    picture.append(group);
    const every = Math.ceil(columns.length / clamped(width / 60, 3, 16));
    if (index % every === 0) picture.append(svg("text", { x: left + wide / 2, y: height - 5, "text-anchor": "middle" }, String(column.first)));
  });
  picture.append(svg("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: height - PAD.bottom, y2: height - PAD.bottom }));
  return picture;
}
