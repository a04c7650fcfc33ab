// Curves of metrics over steps, and the parts of every step as stacked bars.
const HEIGHT = 150;
const PAD = { left: 46, right: 10, top: 10, bottom: 20 };

function curveCard(name, values) {
  const last = values.findLast((value) => value !== null);
  return curvesCard(name, `last ${brief(last)}`, [{ name, values, fill: "--c1" }]);
}

// `lines` are `{ name, values, fill }`, of which more than one get a legend.
function curvesCard(title, beside, lines) {
  const holder = el("div", {});
  onWidth(holder, (width) => holder.replaceChildren(curves(title, RUN.metrics.steps, lines, width)));
  const head = el("div", { class: "chart-head" }, el("h3", {}, title.replace(/([/_])/g, "$1\u200b")), el("span", {}, beside));
  return el("div", { class: "card" }, head, holder, lines.length > 1 ? legend(lines.map(({ name, fill }) => [name, fill])) : null);
}

function curves(title, steps, lines, width) {
  const known = lines.flatMap(({ values }) => values.filter((value) => value !== null));
  let low = known.reduce((least, value) => Math.min(least, value), Infinity);
  let high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  const [first, last] = [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)];
  const x = (step) => PAD.left + ((step - first) / (last - first)) * (width - PAD.left - PAD.right);
  const y = (value) => PAD.top + ((high - value) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": `${title} per step` });
  drawAxes(picture, x, y, [first, last], [low, high], width);
  for (const { values, fill } of lines) {
    for (const part of unbroken(steps, values)) {
      const line = part.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("");
      picture.append(svg("path", { class: "curve", d: line, style: `stroke: var(${fill})` }));
      if (part.length === 1) picture.append(svg("circle", { cx: x(part[0][0]), cy: y(part[0][1]), r: 2.5, style: `fill: var(${fill})` }));
    }
  }
  const cursor = svg("line", { class: "cursor", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" });
  picture.append(cursor);
  const measured = steps.map((step, index) => [step, index]).filter(([, index]) => lines.some(({ values }) => values[index] !== null));
  picture.addEventListener("pointermove", (event) => {
    const wanted = first + ((event.clientX - picture.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) * (last - first);
    const [step, index] = measured.reduce((best, each) => (Math.abs(each[0] - wanted) < Math.abs(best[0] - wanted) ? each : best));
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("transform", `translate(${x(step)},0)`);
    showTip(event, title, [`step ${step}`, ...lines.map(({ name, values }) => `${lines.length > 1 ? `${name}: ` : ""}${brief(values[index])}`)]);
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  return picture;
}

// Where a value is missing the curve is broken.
function unbroken(steps, values) {
  const parts = [[]];
  const sparse = values.filter((value) => value !== null).length < values.length / 2; // as held-out rewards are
  values.forEach((value, index) => {
    if (value !== null) parts[parts.length - 1].push([steps[index], value]);
    else if (!sparse && parts[parts.length - 1].length) parts.push([]);
  });
  return parts.filter((part) => part.length);
}

function drawAxes(picture, x, y, [first, last], [low, high], width) {
  const marks = ticks(low, high, 3);
  for (const value of marks) {
    picture.append(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, markText(value, marks)));
  }
  for (const step of ticks(first, last, clamped(width / 90, 2, 10)).filter(Number.isInteger)) {
    picture.append(svg("text", { x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, String(step)));
  }
  picture.append(svg("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: HEIGHT - PAD.bottom, y2: HEIGHT - PAD.bottom }));
}

// With as many digits as tell one mark from the next.
function markText(value, marks) {
  const stride = marks.length > 1 ? marks[1] - marks[0] : Math.abs(value);
  const digits = Math.max(0, -Math.floor(Math.log10(stride || 1) + 1e-9));
  return Math.abs(value) >= 1e4 || digits > 4 ? brief(value) : value.toFixed(marks.length > 1 ? digits : Math.max(digits, 1)).replace(/\.0$/, "");
}

function metricsSection() {
  const series = RUN.metrics.series;
  const names = Object.keys(series);
  if (!names.length) return;
  const node = section("metrics", "Reward and metrics");
  node.append(el("div", { class: "charts" }, RUN.metrics.first.map((name) => curveCard(name, series[name]))));
  const others = names.filter((name) => !RUN.metrics.first.includes(name)).sort();
  const found = el("div", { class: "charts" });
  const search = el("input", { type: "search", placeholder: "part of a name", "aria-label": "part of a metric's name" });
  const count = el("span", { class: "hint" });
  const look = () => {
    const matching = others.filter((name) => name.includes(search.value.trim()));
    found.replaceChildren(...matching.slice(0, 24).map((name) => curveCard(name, series[name])));
    drawAll();
    count.textContent = matching.length > 24 ? `the first 24 of ${matching.length}` : plural(matching.length, "metric");
  };
  search.addEventListener("input", look);
  const more = el("details", { style: "margin-top: .75rem" }, el("summary", {}, `${others.length} more metrics`), el("div", { class: "bar", style: "margin-top: .6rem" }, search, count), found);
  more.addEventListener("toggle", () => { if (more.open && !found.childElementCount) look(); });
  if (others.length) node.append(more);
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
