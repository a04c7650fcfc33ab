// Shows the run again whenever its files have changed.
function follow() {
  const state = el("span", { id: "live", class: "quiet", role: "status" }, "");
  document.getElementById("when").after(state);
  let changed = Date.now();
  const say = () => { state.textContent = RUN.goes_on ? `goes on · last change ${seconds(Math.round((Date.now() - changed) / 1000))} ago` : "the run is over"; };
  const query = `token=${encodeURIComponent(RUN.token)}`;
  const source = new EventSource(`events?${query}`);
  let shown = document.getElementById("run").textContent;
  const look = async () => {
    const answer = await fetch(`data?${query}`);
    if (!answer.ok) return;
    const text = await answer.text();
    if (text === shown) return;
    shown = text;
    const place = window.scrollY;
    RUN = JSON.parse(text);
    changed = Date.now();
    render();
    window.scrollTo(0, place);
    say();
  };
  source.onerror = () => { state.textContent = "verl-sync watch has ended"; };
  source.onmessage = look;
  source.onopen = look; // what has changed since the page was made
  setInterval(() => { if (source.readyState === EventSource.OPEN) say(); }, 1000);
}
follow();
