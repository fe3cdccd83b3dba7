// The page: unpacks the data, fills in words and tables (as text, never as HTML), and asks for more while a run goes on.
"use strict";
const PAGE = 25, SECONDS = 0.7;
const $ = (id) => document.getElementById(id);
const state = { runs: [], run: 0, hyper: null, chosen: null, page: null, fan: "value", loss: null, logs: { fan: false, loss: false, scale: null } };
const make = (tag, words, more = {}) => Object.assign(document.createElement(tag), { textContent: words, ...more });
const brief = (words) => words.length > 120 ? `${words.slice(0, 119)}...` : words;

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const choose = (index) => { state.chosen = index; state.page = null; render(); };
const charts = {};

function render() {
  const run = state.runs[state.run], columns = run.columns;
  const names = Object.keys(columns.hyperparameters);
  if (!names.includes(state.hyper)) state.hyper = names[0];
  renderWords(run, names);
  renderRuns();
  renderSearch(run);
  for (const part of document.querySelectorAll(".rounds-only")) part.hidden = !run.rounds;
  if (!run.rounds) return;
  const at = Math.min(state.chosen ?? run.rounds - 1, run.rounds - 1);
  const hyper = state.hyper, told = columns.hyperparameters[hyper];
  const probed = columns.probe.some((column) => column.some((x) => x != null));
  state.loss ??= probed ? "probe" : "training";
  state.logs.scale ??= Math.max(...extent(told.scale.filter((x) => x > 0)), 1) / Math.min(...extent(told.scale.filter((x) => x > 0)), 1) > 4;
  $("fan-title").textContent = `What each replica tried: ${brief(hyper)}`;
  buttons("fan-buttons", [["value", "x schedule"], state.fan, (view) => { state.fan = view; }], "fan");
  const compared = columns.best.some((x) => x != null);
  const views = [...(probed ? ["probe"] : []), "training", ...(run.many || !compared ? [] : ["against the mean"])];
  buttons("loss-buttons", [views, state.loss, (view) => { state.loss = view; }], "loss");
  buttons("scale-buttons", null, "scale");
  const stamp = JSON.stringify([run.version, state.run, hyper, state.fan, state.loss, state.logs, css("--lightness")]);
  if (stamp !== state.stamp) {
    for (const spec of [["fan", fan(run, hyper, state.fan, state.logs.fan)], ["loss", loss(run, state.loss, state.logs.loss)],
      ["scale", factor(run, hyper, state.logs.scale)], ["cost", cost(run)]]) charts[spec[0]].draw(spec[1]);
    state.stamp = stamp;
  }
  for (const id of ["fan", "loss", "scale", "cost"]) charts[id].rest(at);
  $("line-figure").hidden = !compared;
  $("events-figure").className = compared ? "" : "wide";
  if (compared) renderLine(run, hyper, at);
  renderEvents(run);
  renderRounds(run, hyper, at);
}

function renderWords(run, names) {
  $("name").textContent = brief(run.name);
  $("state").textContent = run.state;
  $("state").className = `pill ${run.state.replace(" ", "-")}`;
  $("state").title = run.status;
  $("summary").replaceChildren(...run.summary.map((part) => {
    const card = make("div", "", { className: `card ${part.tone || ""}` });
    card.append(make("h2", part.title), make("p", part.text.length > 900 ? `${part.text.slice(0, 899)}...` : part.text));
    return card;
  }));
  options($("run"), state.runs.map((each) => each.name), state.run);
  options($("hyper"), names, names.indexOf(state.hyper));
  $("run-label").hidden = state.runs.length < 2;
  $("hyper-label").hidden = names.length < 2;
}

function renderSearch(run) {
  const search = run.search;
  $("searched").hidden = !search;
  $("cost-text").textContent = search && search.seconds ? `Before the first step: the search, ${text(search.seconds)} seconds.` : "";
  if (!search) return;
  charts.search.draw(searched(search));
  $("search-text").textContent = search.where;
  const told = [["learning rate", text(search.rate)], ["rate before", text(search.start)], ["times that", search.start ? text(search.rate / search.start) : "-"],
    ["losses were low", search.low == null ? "-" : `${text(search.low)} to ${text(search.high)}`],
    ...(search.lower != null && search.lower < search.low ? [["counted from", text(search.lower)]] : []),
    ["loss at the initial weights", text(search.first_loss)], ["lowest loss of the ramps", text(extent([...search.coarse[1], ...search.fine[1]].filter((x) => x != null))[0])],
    ["steps, all undone", text(search.steps)], ["seconds", text(search.seconds)], ["as much as steps of training", text(search.cost == null ? null : Math.round(search.cost))],
    ...search.doubts.map((doubt, k) => [k ? "" : "not sure", brief(doubt)])];
  $("found").replaceChildren(...told.map((cells) => row("td", cells)));
}

function options(select, names, index) {
  if (select.length !== names.length || names.some((name, k) => select.options[k].textContent !== brief(name)))
    select.replaceChildren(...names.map((name, k) => make("option", brief(name), { value: String(k) })));
  select.selectedIndex = index;
}

function buttons(id, views, log) {
  const found = [];
  if (views && views[0].length > 1)
    for (const view of views[0])
      found.push(make("button", view, { type: "button", ariaPressed: String(view === views[1]), onclick: () => { views[2](view); render(); } }));
  if (log) found.push(make("button", "log", { type: "button", ariaPressed: String(state.logs[log]), onclick: () => { state.logs[log] = !state.logs[log]; render(); } }));
  $(id).replaceChildren(...found);
}

function renderLine(run, hyper, at) {
  if (run.many && !run.points[at]) {  // not all rounds of many replicas are in the page: the nearest that is
    const kept = Object.keys(run.points).map(Number);
    at = kept.reduce((best, k) => Math.abs(k - at) < Math.abs(best - at) ? k : best, kept[0]);
  }
  const columns = run.columns, told = columns.hyperparameters[hyper], spec = lineSearch(run, hyper, at);
  $("line-title").textContent = `Round ${columns.round[at]}: loss along ${brief(hyper)}`;
  const step = (by) => make("button", by < 0 ? "<" : ">", { type: "button", ariaLabel: by < 0 ? "round before" : "next round",
    onclick: () => choose(Math.max(0, Math.min(run.rounds - 1, at + by))) });
  $("line-buttons").replaceChildren(step(-1), step(1), make("button", "last", { type: "button", onclick: () => choose(null) }));
  charts.line.draw(spec);
  const best = columns.best[at], words = [`Step ${text(columns.step[at])}.`];
  if (best != null && spec.count > 1) words.push(`Replica ${best} has the lowest loss.`);
  if (spec.vertex != null) words.push(`The lowest point of the parabola is at ${text(spec.vertex)} times this round's steps.`);
  if (told.vertex[at] != null) words.push(`Over the last rounds: ${text(told.vertex[at])}, to be moved to ${text(told.target[at])}.`);
  if (told.decision[at]) words.push(`Decision: ${told.decision[at]}.`);
  if (told.finding[at]) words.push(`Evidence: ${brief(told.finding[at])}.`);
  if (!spec.count) words.push("No losses were compared in this round.");
  $("line-text").textContent = words.join(" ");
}

function renderEvents(run) {
  const list = make("ol", "");
  for (const [index, step, words] of run.events.slice(-500).reverse()) {
    const row = make("li", "", { tabIndex: 0, onclick: () => choose(index) });
    row.append(make("b", `step ${step.toLocaleString("en")}`), make("span", words.length > 600 ? `${words.slice(0, 599)}...` : words));
    list.append(row);
  }
  $("events").replaceChildren(run.events.length ? list : make("p", "Nothing out of the ordinary happened.", { className: "note" }));
}

function renderRounds(run, hyper, at) {
  const columns = run.columns, told = columns.hyperparameters[hyper], pages = Math.ceil(run.rounds / PAGE);
  const page = state.page ?? Math.floor(at / PAGE);
  const go = (to, label) => make("button", label, { type: "button", disabled: to < 0 || to >= pages, onclick: () => { state.page = to; render(); } });
  $("pager").replaceChildren(go(0, "<<"), go(page - 1, "<"), make("span", `${page + 1} / ${pages}`), go(page + 1, ">"), go(pages - 1, ">>"));
  const head = ["round", "step", "loss, mean", "best replica", "schedule", "center", "factor", "decision", "evidence", "seconds", "overhead"];
  const table = [row("th", head)];
  for (let i = page * PAGE; i < Math.min(run.rounds, (page + 1) * PAGE); i++) {
    const seconds = columns.round_seconds[i], spent = (columns.converge_seconds[i] || 0) + (columns.probe_seconds[i] || 0);
    const cells = row("td", [text(columns.round[i]), text(columns.step[i]), text(columns.mean[i] ?? columns.own[i]), text(columns.best[i]), text(told.base[i]), text(told.center[i]),
      text(told.scale[i]), brief(told.decision[i]), brief(told.finding[i]), text(seconds), seconds ? `${text(100 * spent / seconds)} %` : "-"]);
    cells.className = i === at ? "chosen" : "";
    cells.onclick = () => choose(i);
    table.push(cells);
  }
  $("rounds").replaceChildren(...table);
}

function row(tag, cells) {
  const made = make("tr", "");
  made.append(...cells.map((words) => make(tag, words)));
  return made;
}

function renderRuns() {
  $("compare").hidden = state.runs.length < 2;
  if (state.runs.length < 2) return;
  const of = (run) => run.columns.mean.some((x) => x != null) ? [run.columns.step, run.columns.mean]
    : run.losses[0].length ? run.losses : [run.columns.step, run.columns.own];
  const hyper = state.hyper ?? state.runs.flatMap((run) => Object.keys(run.columns.hyperparameters))[0] ?? "learning rate";
  const center = (run) => run.columns.hyperparameters[hyper] ? [run.columns.step, run.columns.hyperparameters[hyper].center]
    : run.rounds ? null : [run.losses[0], run.losses[2]];  // a plain run: its learning rate
  charts.compareLoss.draw(compare(state.runs, "training loss", of, state.logs.loss));
  charts.compareCenter.draw(compare(state.runs, brief(hyper), center, state.logs.fan));
  const table = [row("th", ["run", "state", "rounds", "replicas", "last mean loss", "held-out loss", "factor", "overhead"])];
  state.runs.forEach((run, k) => {
    const told = run.columns.hyperparameters[hyper], sum = (column) => column.reduce((s, x) => s + (x || 0), 0);
    const c = run.columns, searched = run.search?.seconds || 0, total = sum(c.round_seconds) + searched;
    const last = (column) => column.filter((x) => x != null).pop(), mean = last(c.mean) ?? run.losses[1].at(-1) ?? last(c.own);
    const spent = searched + sum(c.converge_seconds) + sum(c.probe_seconds);
    const cells = row("td", [brief(run.name), run.state, text(run.rounds), text(run.replicas), text(mean), text(run.held_out),
      text(told ? told.scale.at(-1) : null), run.rounds && total ? `${text(100 * spent / total)} %` : "-"]);
    cells.className = k === state.run ? "chosen" : "";
    cells.onclick = () => { state.run = k; state.chosen = null; state.loss = null; state.logs.scale = null; render(); };
    table.push(cells);
  });
  $("runs").replaceChildren(...table);
}

// Live: the rounds that came since.
const NESTED = new Set(["scores", "probe", "values"]);
function extend(ours, more) {
  for (const [key, part] of Object.entries(more)) {
    if (!Array.isArray(part)) { ours[key] ??= {}; extend(ours[key], part); }
    else if (NESTED.has(key)) { ours[key] ??= []; part.forEach((column, k) => { ours[key][k] = [...(ours[key][k] || []), ...column]; }); }
    else ours[key] = [...(ours[key] || []), ...part];
  }
}

function merge(index, more) {
  const ours = state.runs[index];
  if (more.since === 0 || !ours.rounds) { state.runs[index] = more; return; }
  const columns = ours.columns, points = { ...ours.points, ...more.points }, events = [...ours.events, ...more.events];
  extend(columns, more.columns);
  state.runs[index] = { ...more, columns, points, events };
}

async function poll() {
  try {
    const have = state.runs.map((run) => run.version).join(",");
    const answer = await fetch(`data?have=${have}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const { runs } = await answer.json();
    runs.forEach((more, index) => { if (more) merge(index, more); });
    if (runs.some((more) => more) || state.lost) { state.lost = false; render(); }
  } catch {
    state.lost = true;
    $("state").textContent = "lost contact with hdet watch";
    $("state").className = "pill stalled";
  }
  setTimeout(poll, 1000 * SECONDS);
}

function theme(name) { document.documentElement.dataset.theme = name; render(); }

async function begin() {
  const data = await unpack($("data").textContent);
  Object.assign(state, { runs: data.runs, chosen: data.chosen, run: Math.max(0, data.runs.findIndex((run) => run.rounds)) });
  for (const id of ["fan", "loss", "scale", "cost"]) charts[id] = new Chart(id, choose);
  charts.line = new Chart("line");
  charts.search = new Chart("search");
  charts.compareLoss = new Chart("compare-loss");
  charts.compareCenter = new Chart("compare-center");
  $("run").onchange = (event) => { state.run = event.target.selectedIndex; state.chosen = null; state.loss = null; state.logs.scale = null; render(); };
  $("hyper").onchange = (event) => { state.hyper = Object.keys(state.runs[state.run].columns.hyperparameters)[event.target.selectedIndex]; state.logs.scale = null; render(); };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  $("theme").onclick = () => theme(now() === "dark" ? "light" : "dark");
  dark.addEventListener("change", () => render());
  let before = "";
  addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme || ""; theme("light"); });
  addEventListener("afterprint", () => theme(before));
  render();
  document.body.dataset.ready = "yes";
  if (data.live) poll();
}
begin();
