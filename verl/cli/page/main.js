// The page from top to bottom.
function head() {
  document.getElementById("name").textContent = RUN.name;
  document.getElementById("when").textContent = [
    RUN.began_s ? iso(RUN.began_s) : null, RUN.took_s ? seconds(RUN.took_s) : null, `read by verl-sync ${RUN.program}`,
  ].filter((each) => each).join(" · ");
}

function tiles() {
  document.getElementById("main").append(el("div", { class: "tiles" }, RUN.tiles.map(([value, what, level]) =>
    el("div", { class: "card tile" }, el("b", { class: level || null }, typeof value === "number" ? brief(value) : value), el("span", {}, what)))));
}

const iso = (began_s) => new Date(began_s * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC";

// What was run: names and texts; of several runs a column each.
function aboutSection() {
  if (RUN.runs) {
    table("settings", "Settings that differ", RUN.settings, "The configuration of the runs is the same, or is not recorded.");
    table("about", "What was run", RUN.about.concat(RUN.runs.some(({ held_out }) => held_out.length) ? heldOutRows() : []));
    return;
  }
  if (!RUN.about.length) return;
  const rows = RUN.about.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, name === "command" ? el("code", {}, text) : text)]);
  section("about", "What was run").append(el("dl", { class: "card about" }, rows));
}

function heldOutRows() {
  const sources = [...new Set(RUN.runs.flatMap(({ held_out }) => held_out.map(([source]) => source)))];
  const of = (run, source) => run.held_out.find(([own]) => own === source);
  return sources.map((source) => [`held-out ${source}`, RUN.runs.map((run) => of(run, source)?.[1] ?? "")]);
}

function table(id, title, rows, empty) {
  const node = section(id, title);
  if (!rows.length) { node.append(el("p", { class: "card" }, empty)); return; }
  const heads = ["", ...RUN.runs.map(({ name }) => name)].map((name) => el("th", { class: "left", scope: "col" }, name));
  const body = rows.map(([name, values]) => el("tr", {}, el("td", { class: "left" }, name), values.map((value) => el("td", { class: "left wrap" }, value))));
  node.append(el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body))));
}

function answersSection() {
  if (!RUN.samples.length) return;
  const node = section("samples", "Answers to the same prompts", "The last that each run has kept.");
  node.append(el("div", { class: "answers" }, RUN.samples.map(({ prompt, truth, answers }) => el("article", { class: "card samples" },
    el("pre", { class: "quiet" }, prompt), truth ? el("div", { class: "facts" }, el("span", {}, "truth ", el("b", {}, String(truth)))) : null,
    answers.map(({ run, step, response, score }) => el("div", {}, el("div", { class: "facts" }, el("b", {}, run), el("span", {}, `step ${step}, score ${brief(score)}`)), el("pre", {}, response)))))));
}

function memorySection() {
  if (!RUN.memory.length) return;
  const node = section("memory", "Memory", "The most that the largest process of a kind held in each phase, in GB; without a phase: since it began.");
  node.append(el("div", { class: "charts" }, RUN.memory.map(({ role, lines }) => curvesCard(role, "GB", lines.map(({ name, metric }, index) =>
    ({ name, values: RUN.metrics.series[metric], fill: `--c${(index % 8) + 1}` }))))));
}

let view = null;

// The whole page, of what RUN holds now.
function render() {
  for (const id of ["main", "contents"]) document.getElementById(id).replaceChildren();
  redraw.length = repaint.length = 0;
  head();
  aboutSection();
  if (RUN.runs) {
    metricsSection();
    answersSection();
  } else {
    tiles();
    metricsSection();
    breakdownSection();
    view = timelineSection();
    incidentsSection();
    memorySection();
    syncsSection(view);
    samplesSection();
  }
  drawAll();
  document.documentElement.dataset.ready = "true";
}
render();
