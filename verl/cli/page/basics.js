"use strict";
// Everything shown comes from files of a run: it becomes text nodes, never markup.
let RUN = JSON.parse(document.getElementById("run").textContent);
const SVG = "http://www.w3.org/2000/svg";
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

// A number in a few characters, as 12.3k or 0.0042.
function brief(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential(1);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return trimmed(value / (letter === "k" ? 1e3 : limit), 3) + letter;
  }
  return trimmed(value, 4);
}
const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));
function seconds(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${trimmed(value, 3)} s`;
  return size >= 1e-3 || size === 0 ? `${trimmed(value * 1e3, 3)} ms` : `${trimmed(value * 1e6, 3)} µs`;
}
function bytes(value) {
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= limit) return `${trimmed(value / limit, 3)} ${unit}`;
  }
  return `${value} B`;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clamped = (value, low, high) => Math.min(Math.max(value, low), high);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const tip = document.getElementById("tip");
function showTip(event, title, lines) {
  tip.replaceChildren(el("b", {}, title), lines.filter((line) => line).join("\n"));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 14 + box.width > window.innerWidth - 8;
  tip.style.left = `${clamped(right ? event.clientX - 14 - box.width : event.clientX + 14, 8, Math.max(8, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${clamped(event.clientY + 14, 8, Math.max(8, window.innerHeight - box.height - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };

// Draws into `node` when `drawAll` is called, for it has no width before it is in the page, and whenever its width changes.
const undrawn = [];
function onWidth(node, draw) {
  let last = 0;
  const look = () => {
    const width = Math.floor(node.clientWidth);
    if (width && width !== last) { last = width; draw(width); }
  };
  undrawn.push(look);
  new ResizeObserver(() => requestAnimationFrame(look)).observe(node); // drawing changes sizes
}
const drawAll = () => undrawn.splice(0).forEach((look) => look());

// Round values from `low` to `high`, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let each = Math.ceil(low / stride); each * stride <= high + stride * 1e-9; each++) found.push(each * stride);
  return found;
}

const repaint = [];
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  repaint.forEach((each) => each());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint.forEach((each) => each()));

function section(id, title, hint) {
  document.getElementById("contents").append(el("a", { href: `#${id}` }, title));
  const node = el("section", { id, "aria-label": title }, el("h2", {}, title), hint ? el("p", { class: "hint" }, hint) : null);
  document.getElementById("main").append(node);
  return node;
}
