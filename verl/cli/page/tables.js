// Syncs, failures and samples.
const PHASE_COLOURS = { prepare: "--c4", publish: "--c5", stage: "--c1", verify: "--c2", wait: "--rest", commit: "--c7", activate: "--c6", resume: "--c3" };
const FIRST_ROWS = 50;
const COLUMNS = [
  ["version", (sync) => sync.version, (sync) => String(sync.version)],
  ["outcome", (sync) => sync.outcome, (sync) => el("span", { class: `level ${sync.outcome === "committed" ? "good" : "bad"}` }, sync.outcome)],
  ["took", (sync) => sync.total_s, (sync) => seconds(sync.total_s)],
  ["phases", (sync) => sync.total_s, phaseBar],
  ["stage", (sync) => sync.phase_s.stage, (sync) => seconds(sync.phase_s.stage)],
  ["activate", (sync) => sync.phase_s.activate, (sync) => seconds(sync.phase_s.activate)],
  ["slowest", (sync) => sync.slowest, (sync) => sync.slowest || "-"],
  ["moved", (sync) => sync.nbytes_moved, (sync) => bytes(sync.nbytes_moved)],
  ["rate", (sync) => sync.gbytes_per_s, (sync) => `${brief(sync.gbytes_per_s)} GB/s`],
  ["trainer blocked", (sync) => sync.trainer_blocked_s, (sync) => seconds(sync.trainer_blocked_s)],
  ["paused", (sync) => sync.paused_s, (sync) => seconds(sync.paused_s)],
  ["retries", (sync) => sync.retries, (sync) => String(sync.retries)],
];
const columns = () => COLUMNS.filter(([name]) => name !== "slowest" || RUN.syncs.some((sync) => sync.slowest));
const LEFT = ["outcome", "phases", "slowest"];

function phaseBar(sync) {
  const parts = Object.entries(sync.phase_s).filter(([, value]) => value > 0);
  return el("span", { class: "phases", title: parts.map(([name, value]) => `${name} ${seconds(value)}`).join(", ") },
    parts.map(([name, value]) => el("i", { style: `background: var(${PHASE_COLOURS[name] || "--rest"}); flex: ${value / sync.total_s}` })));
}

function syncsSection(view) {
  if (!RUN.syncs.length) return;
  const node = section("syncs", "Syncs", "Click a row for all there is to say about it, a head to sort.");
  const body = el("tbody", {});
  const more = el("button", { type: "button", style: "margin-top: .6rem" });
  let rows = [...RUN.syncs].reverse();
  let shown = FIRST_ROWS;
  let sorted = [null, 1];
  const fill = () => {
    body.replaceChildren(...rows.slice(0, shown).map((sync) => syncRow(sync, view)));
    more.hidden = rows.length <= shown;
    more.textContent = `all ${rows.length} syncs`;
  };
  more.addEventListener("click", () => { shown = rows.length; fill(); });
  const heads = columns().map(([name, key]) => {
    const sort = () => {
      sorted = [name, sorted[0] === name ? -sorted[1] : -1];
      const order = (one, two) => (key(one) < key(two) ? -1 : key(one) > key(two) ? 1 : 0);
      rows = [...RUN.syncs].sort((one, two) => sorted[1] * order(one, two));
      fill();
    };
    return el("th", { class: LEFT.includes(name) ? "left" : null, scope: "col" }, el("button", { type: "button", onclick: sort }, name));
  });
  fill();
  node.append(el("div", { class: "card" }, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), legend(Object.entries(PHASE_COLOURS)), more));
}

function syncRow(sync, view) {
  const cells = columns().map(([name, , text]) => el("td", { class: LEFT.includes(name) ? "left" : null }, text(sync)));
  const row = el("tr", { class: "row", tabindex: 0, "aria-expanded": "false" }, cells);
  const open = () => {
    const below = row.nextElementSibling;
    row.setAttribute("aria-expanded", String(!(below && below.classList.contains("more"))));
    if (below && below.classList.contains("more")) below.remove();
    else row.after(el("tr", { class: "more" }, el("td", { colspan: columns().length }, syncDetails(sync, view))));
  };
  row.addEventListener("click", open);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } });
  return row;
}

function syncDetails(sync, view) {
  const facts = [
    ["began", iso(sync.began_s)],
    ["phases", Object.entries(sync.phase_s).filter(([, value]) => value > 0).map(([name, value]) => `${name} ${seconds(value)}`).join(", ")],
    ["backend", sync.backend],
    ["needed, moved", `${bytes(sync.nbytes_needed)}, ${bytes(sync.nbytes_moved)}`],
    ...sync.facts,
  ];
  const list = el("dl", {}, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const show = () => { view.focus(sync.start, sync.start + sync.total_s); document.getElementById("timeline").scrollIntoView(); };
  return [list, view ? el("button", { type: "button", onclick: show, style: "margin-top: .5rem" }, "show in the timeline") : null];
}

function incidentsSection() {
  const node = section("failures", "Failures and recoveries");
  const text = "None: every sync was committed at its first attempt and about as quickly as usual, and no replica left service.";
  if (!RUN.incidents.length) { node.append(el("p", { class: "card" }, text)); return; }
  const list = el("ol", { class: "incidents" });
  const more = el("button", { type: "button", style: "margin-top: .6rem" }, `all ${RUN.incidents.length}`);
  const fill = (count) => list.replaceChildren(...RUN.incidents.slice(0, count).map(({ step, level, what, text: said }) =>
    el("li", {}, el("span", { class: "quiet" }, `step ${step}`), el("span", { class: `level ${level}` }, what), el("span", {}, said))));
  fill(FIRST_ROWS);
  more.hidden = RUN.incidents.length <= FIRST_ROWS;
  more.addEventListener("click", () => { fill(RUN.incidents.length); more.hidden = true; });
  node.append(el("div", { class: "card" }, list, more));
}

function samplesSection() {
  if (!RUN.samples.length) return;
  const node = section("samples", "Samples", "The line below a token has the colour of the version of the weights that generated it.");
  const groups = new Map();
  for (const sample of RUN.samples) {
    const key = `${sample.where}, step ${sample.step}`;
    groups.set(key, [...(groups.get(key) || []), sample]);
  }
  const choice = el("select", { "aria-label": "which samples" }, [...groups.keys()].map((key) => el("option", {}, key)));
  const holder = el("div", { class: "samples" });
  const fill = () => holder.replaceChildren(...groups.get(choice.value).map(sampleCard));
  choice.value = [...groups.keys()].at(-1);
  choice.addEventListener("change", fill);
  fill();
  node.append(el("div", { class: "bar" }, choice), holder);
}

function sampleCard(sample) {
  const versions = [...new Set(sample.pieces.map((piece) => piece.version))].filter((version) => version >= 0).sort((one, two) => one - two);
  const line = (version) => (version < 0 ? "--rest" : `--c${(versions.indexOf(version) % 8) + 1}`);
  const name = (version) => (version < 0 ? "inserted" : `version ${version}`);
  const pieces = sample.pieces.map(({ version, count, text }) => el("span", { class: "piece", style: `border-color: var(${line(version)})`, title: `${name(version)}, ${plural(count, "token")}` }, text));
  const counted = [...new Set(sample.pieces.map((piece) => piece.version))].map((version) => [
    `${name(version)}: ${plural(sample.pieces.filter((piece) => piece.version === version).reduce((sum, piece) => sum + piece.count, 0), "token")}`, line(version)]);
  const facts = [["score", brief(sample.score)], ["truth", sample.truth], ["tokens", sample.tokens], ["ended", sample.stop], ["by", sample.replicas.join(", ")]];
  return el("article", { class: "card" },
    el("div", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== "" && value !== undefined).map(([key, value]) => el("span", {}, `${key} `, el("b", {}, String(value))))),
    el("pre", { class: "quiet" }, sample.prompt),
    el("pre", {}, pieces.length && RUN.decoded ? pieces : sample.response),
    pieces.length && !RUN.decoded ? el("pre", { class: "quiet" }, pieces) : null,
    counted.length ? legend(counted) : null);
}
