// The page from top to bottom.
function head() {
  document.getElementById("name").textContent = RUN.name;
  document.getElementById("when").textContent = [
    RUN.began_s ? new Date(RUN.began_s * 1000).toLocaleString() : null, RUN.took_s ? seconds(RUN.took_s) : null, `read by verl-sync ${RUN.program}`,
  ].filter((each) => each).join(" · ");
  document.getElementById("main").append(el("div", { class: "tiles" }, RUN.tiles.map(([value, what, level]) =>
    el("div", { class: "card tile" }, el("b", { class: level || null }, typeof value === "number" ? brief(value) : value), el("span", {}, what)))));
}

function memorySection() {
  if (!RUN.memory.length) return;
  const node = section("memory", "Memory", "The most that the largest process of a kind held in each phase, in GB; without a phase: since it began.");
  node.append(el("div", { class: "charts" }, RUN.memory.map(({ role, lines }) => curvesCard(role, "GB", lines.map(({ name, metric }, index) =>
    ({ name, values: RUN.metrics.series[metric], fill: `--c${(index % 8) + 1}` }))))));
}

head();
metricsSection();
breakdownSection();
const view = timelineSection();
incidentsSection();
memorySection();
syncsSection(view);
samplesSection();
drawAll();
document.documentElement.dataset.ready = "true";
