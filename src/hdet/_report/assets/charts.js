// What each chart shows, as options and columns for uPlot, which draws them. page.js decides when.
"use strict";
const HEIGHT = 260, MOST_DOTS = 3000;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shade = (replica) => `hsl(${(replica * 137.5 + 210) % 360} 62% ${css("--lightness")})`;
const text = (x) => x == null ? "-" : Number.isInteger(x) && Math.abs(x) < 1e6 ? x.toLocaleString("en")
  : Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6 ? x.toExponential(3) : String(Number(x.toPrecision(4)));
const tick = (x) => x == null ? "" : x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6) ? x.toExponential().replace("e+", "e") : String(Number(x.toPrecision(6)));
const positive = (column) => column.map((x) => x > 0 ? x : null);
const shown = (_, x) => text(x);

// One chart in one element. The same key means the same series: new data keep the zoom.
class Chart {
  constructor(id, onChoose) {
    this.element = document.getElementById(id);
    this.onChoose = onChoose;
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.width(), height: HEIGHT })).observe(this.element);
  }
  rest(at) {  // while nobody points at the chart, its legend shows the chosen round
    this.at = at;  // later, as uPlot clears it when it has drawn
    setTimeout(() => { if (this.rounds && this.plot && !this.element.matches(":hover")) this.plot.setLegend({ idx: at }); });
  }
  width() { return Math.max(240, this.element.clientWidth); }
  draw(spec) {
    const key = JSON.stringify(spec.key);
    if (this.plot && this.key === key) {
      const x = this.plot.scales.x, all = this.plot.data[0];
      const zoomed = all.length > 1 && (x.min > all[0] || x.max < all[all.length - 1]);
      this.plot.setData(spec.data, !zoomed);
      if (zoomed) this.plot.redraw();
      return;
    }
    if (this.plot) this.plot.destroy();
    this.key = key;
    this.element.replaceChildren();
    const axis = (more) => ({ stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20, ...more });
    this.plot = new uPlot({
      width: this.width(), height: HEIGHT, padding: [10, 26, 0, 0],
      series: [{ label: spec.x, value: shown }, ...spec.series],
      bands: spec.bands || [],
      hooks: spec.hooks || {},
      scales: { x: { time: false, distr: spec.xLog ? 3 : 1, range: spec.xRange }, y: { distr: spec.log ? 3 : 1, range: spec.range } },
      axes: [axis({ label: spec.x, values: (_, ticks) => ticks.map(tick) }),
             axis({ size: 70, label: spec.y, values: (_, ticks) => ticks.map(tick) })],
      cursor: { sync: spec.own ? undefined : { key: "rounds" }, drag: { x: true, y: false }, points: { size: 7 } },
      legend: { live: true },
    }, spec.data, this.element);
    this.rounds = !spec.own;
    this.plot.over.addEventListener("mouseleave", () => this.rest(this.at));
    if (this.onChoose) {
      let from = 0;
      this.plot.over.addEventListener("mousedown", (event) => { from = event.clientX; });
      this.plot.over.addEventListener("click", (event) => {
        if (Math.abs(event.clientX - from) < 3 && this.plot.cursor.idx != null) this.onChoose(this.plot.cursor.idx);
      });
    }
  }
}

const line = (label, color, more = {}) => ({ label, stroke: color, width: 2, points: { show: false }, value: shown, ...more });
const dots = (label, color, size = 5) => ({ label, stroke: color, fill: color, width: 0, paths: () => null, value: shown,
  points: { show: true, size, width: 0, fill: color } });
const silent = (label, color) => ({ label, stroke: color, width: 0, paths: () => null, points: { show: false }, value: shown });
const edge = (label) => ({ label, stroke: "transparent", width: 0, points: { show: false }, value: shown });

// Each replica as dots, or as a thin line where dots would be too many; many replicas as two bands and their median.
function replicas(run, columns, long, color) {
  if (!run.many) {
    const size = columns.length ? columns[0].length : 0;
    const make = size <= MOST_DOTS ? (label, color) => dots(label, color, size <= 150 ? 5 : 3) : long;
    return { data: columns, series: columns.map((_, k) => make(`replica ${k}`, shade(k))), bands: [] };
  }
  const names = ["lowest", "lower quarter", "median", "upper quarter", "highest"];
  const series = names.map((name) => name === "median" ? line(name, color, { width: 1.5 }) : edge(name));
  return { data: columns, series, bands: [{ series: [5, 1], fill: css("--band") }, { series: [4, 2], fill: css("--band") }] };
}

function fan(run, hyper, view, log) {
  const told = run.columns.hyperparameters[hyper], base = told.base;
  const relative = view === "x schedule";
  const scaled = (column) => {
    const out = relative ? column.map((x, i) => x == null || !base[i] ? null : x / base[i]) : column;
    return log ? positive(out) : out;
  };
  const tried = replicas(run, told.values.map(scaled), silent, css("--accent"));
  let { series, data, bands } = tried;
  if (!run.many && data.length) {  // a band behind the dots, from the lowest to the highest
    const rows = data[0].map((_, i) => data.map((column) => column[i]).filter((x) => x != null));
    data = [rows.map((row) => row.length ? Math.min(...row) : null), rows.map((row) => row.length ? Math.max(...row) : null), ...data];
    series = [edge("lowest"), edge("highest"), ...series];
    bands = [{ series: [2, 1], fill: css("--band") }];
  }
  return {
    key: ["fan", run.name, hyper, view, log, run.replicas, dotted(run), css("--lightness")], x: "step", y: relative ? "times the schedule" : hyper.slice(0, 60), log, bands,
    series: [...series, line("schedule", css("--muted"), { dash: [6, 4], width: 1.5 }), line("center", css("--text"))],
    data: [run.columns.step, ...data, scaled(base), scaled(told.center)],
  };
}

function loss(run, view, log) {
  const columns = run.columns, against = view === "against the mean";
  const probe = view === "probe" || (against && columns.probe.some((column) => column.some((x) => x != null)));
  const clean = (column) => log ? positive(column) : column;
  const known = columns.mean.some((x) => x != null);
  if (!known && !probe && run.losses[0].length) {  // nothing was gathered, but the run wrote its mean loss
    return { key: ["loss", run.name, "mean", log, css("--lightness")], x: "step", y: "training loss", log, own: true,
      series: [line("mean of the replicas", css("--accent"))], data: [run.losses[0], clean(run.losses[1])] };
  }
  const own = columns.own.some((x) => x != null);
  if (!known && !probe && own)  // nothing was gathered: what the first replica has noted of its own losses
    return { key: ["loss", run.name, "own", log, css("--lightness")], x: "step", y: "training loss of the first replica", log,
      series: [line("first replica", css("--accent"), { spanGaps: true })], data: [columns.step, clean(columns.own)] };
  if (against) {  // who was better than the others, round by round
    const judged = probe ? columns.probe : columns.scores;
    const mean = columns.step.map((_, i) => { const row = judged.map((c) => c[i]).filter((x) => x != null); return row.reduce((s, x) => s + x, 0) / row.length; });
    const tried = replicas(run, judged.map((column) => column.map((x, i) => x == null ? null : x - mean[i])), line, css("--accent"));
    return { key: ["loss", run.name, view, run.replicas, dotted(run), css("--lightness")], x: "step", y: "loss - mean of the round", bands: tried.bands,
      series: tried.series, data: [columns.step, ...tried.data] };
  }
  const thin = (label, color) => line(label, color, { width: 1 });
  const tried = replicas(run, (probe ? columns.probe : columns.scores).map(clean), thin, css("--accent"));
  const rest = own && !probe;  // rounds in which nothing was gathered, among others
  const alone = rest ? [line("first replica alone", css("--second"), { width: 1.5, spanGaps: true })] : [];
  const center = probe ? [...columns.start.slice(1), null] : columns.mean;  // a round starts from the consensus of the last
  return {
    key: ["loss", run.name, view, log, rest, run.replicas, dotted(run), css("--lightness")], x: "step", y: probe ? "loss on the probe" : "training loss of the round", log,
    bands: tried.bands, series: [...tried.series, line(probe ? "consensus, next probe" : "mean of the replicas", css("--text")), ...alone],
    data: [columns.step, ...tried.data, clean(center), ...(rest ? [clean(columns.own)] : [])],
  };
}

const dotted = (run) => run.columns.step.length <= MOST_DOTS;

function factor(run, hyper, log) {
  const told = run.columns.hyperparameters[hyper];
  const reach = (sign) => told.estimate.map((d, i) => d == null || told.error[i] == null || told.scale_before[i] == null ? null
    : told.scale_before[i] * Math.exp(Math.max(-40, Math.min(40, d + sign * 2 * told.error[i]))));
  const known = told.scale.filter((x) => x > 0), at = new Set(run.events.map(([index]) => index));
  const low = Math.min(1, ...extent(known)), high = Math.max(1, ...extent(known));
  const room = log ? (x, up) => up ? x * 2 : x / 2 : (x, up) => up ? x + 0.25 * (high - low) + 0.05 : Math.max(0, x - 0.25 * (high - low) - 0.05);
  return {
    key: ["factor", run.name, hyper, log, css("--lightness")], x: "step", y: "times the schedule", log, range: () => [room(low, false), room(high, true)],
    bands: [{ series: [2, 1], fill: css("--band") }],
    series: [edge("evidence, from"), edge("to (2 standard errors)"), line("1 = schedule", css("--muted"), { dash: [6, 4], width: 1.5 }),
             line("factor", css("--accent"), { paths: uPlot.paths.stepped({ align: 1 }) }), dots("event", css("--bad"), 9)],
    data: [run.columns.step, reach(-1), reach(1), told.scale.map(() => 1), told.scale, told.scale.map((x, i) => at.has(i) ? x : null)],
  };
}

function extent(column) {
  let low = Infinity, high = -Infinity;
  for (const x of column) { if (x < low) low = x; if (x > high) high = x; }
  return column.length ? [low, high] : [];
}

function cost(run) {
  const columns = run.columns;
  const share = (column) => column.map((x, i) => x == null || !columns.round_seconds[i] ? null : 100 * x / columns.round_seconds[i]);
  return {
    key: ["cost", run.name, css("--lightness")], x: "step", y: "% of the round", range: (_, low, high) => [0, Math.max(5, Math.min(100, 1.1 * high))],
    series: [line("converge %", css("--accent"), { width: 1.5 }), line("probe %", css("--second"), { width: 1.5 }),
             silent("seconds", css("--muted"))],
    data: [columns.step, share(columns.converge_seconds), share(columns.probe_seconds), columns.round_seconds],
  };
}

// The search before the first step: both ramps, where losses were low, and the answer.
function searched(search) {
  const tables = [search.coarse, search.fine].filter(([rates]) => rates.length), width = 1.5, spanGaps = true;
  const ramps = [line("first ramp", css("--second"), { width, spanGaps }), line("second ramp", css("--accent"), { width, spanGaps })];
  const series = [search.coarse, search.fine].flatMap(([rates], k) => rates.length ? [ramps[k]] : []);
  const near = search.fine[0].length ? search.fine : search.coarse;
  if (near[0].length) {  // on the ramp, where it was nearest to the answer
    const away = near[0].map((rate) => Math.abs(Math.log(rate / search.rate))), at = away.indexOf(Math.min(...away));
    tables.push([[search.rate], [near[1][at]]]);
    series.push(dots("found", css("--good"), 11));
  }
  const data = tables.length ? uPlot.join(tables) : [[], []];
  if (search.first_loss != null) { data.push(data[0].map(() => search.first_loss)); series.push(line("initial weights", css("--muted"), { dash: [6, 4], width: 1 })); }
  const across = (u, from, to, color) => {
    const [left, right] = [from, to].map((rate) => Math.max(u.bbox.left, Math.min(u.valToPos(rate, "x", true), u.bbox.left + u.bbox.width)));
    u.ctx.fillStyle = color;
    u.ctx.fillRect(left, u.bbox.top, Math.max(right - left, 2), u.bbox.height);
  };
  const low = css("--low"), found = css("--good");
  const shade = (u) => {
    u.ctx.save();
    if (search.low != null) across(u, search.low, search.high, low);
    if (search.lower != null && search.lower < search.low) across(u, search.lower, search.low, css("--counted"));
    across(u, search.rate, search.rate, found);
    u.ctx.restore();
  };
  return { key: ["search", search.rate, css("--lightness")], x: "learning rate", y: "loss on the probe", own: true, xLog: true, series, data, hooks: { drawClear: [shade] } };
}

// The points of one round, its parabola, and where its lowest point is and should be.
function lineSearch(run, hyper, at) {
  const told = run.columns.hyperparameters[hyper], center = told.center[at], start = run.columns.start[at];
  const probed = run.columns.probe.some((column) => column[at] != null);
  const raw = run.many ? run.points[at] : null;
  const values = run.many ? (raw ? raw.values[hyper] : []) : told.values.map((column) => column[at]);
  const losses = run.many ? (raw ? raw.losses : []) : (probed ? run.columns.probe : run.columns.scores).map((column) => column[at]);
  const rises = probed && start != null;
  const pairs = values.map((value, k) => [center ? value / center : value, losses[k] == null ? null : rises ? losses[k] - start : losses[k]])
    .filter(([, y]) => y != null).sort((one, other) => one[0] - other[0]);
  const tables = [[pairs.map((p) => p[0]), pairs.map((p) => p[1])]];
  const series = [dots("replicas", css("--accent"), run.many ? 4 : 9)];
  const fitted = told.fit[at];
  let vertex = null;
  if (fitted && rises) {
    const [c, a, b] = fitted, height = (x) => c + a * x + b * x * x;
    const own = b > 0 && a < 0 ? -a / (2 * b) : null, target = told.target[at];
    vertex = own;
    const marks = [own, target].filter((x) => x != null && x < 4);
    const high = 1.1 * Math.max(...marks, ...tables[0][0]), xs = Array.from({ length: 121 }, (_, k) => k * high / 120);
    tables.push([xs, xs.map(height)]);
    series.push(line("parabola", css("--muted"), { width: 1.5, spanGaps: true }));
    if (own != null && own < 4) { tables.push([[own], [height(own)]]); series.push(dots("vertex", css("--second"), 12)); }
    if (target != null) { tables.push([[target], [height(target)]]); series.push(dots("target of the vertex", css("--good"), 12)); }
  }
  return {
    key: ["line", run.name, hyper, at, series.length, css("--lightness"), pairs.length], x: "times the center", y: rises ? "loss - loss at the start" : "loss", own: true,
    series, data: pairs.length ? uPlot.join(tables) : [[], []], vertex, count: pairs.length,
  };
}

// The same column of several runs, over their own steps.
function compare(runs, kind, column, log) {
  const told = runs.map((run) => [run, column(run)]).filter(([, c]) => c && c[0].length);
  const data = told.length ? uPlot.join(told.map(([, [x, y]]) => [x, log ? positive(y) : y])) : [[], []];
  return { key: ["compare", kind, told.map(([run]) => run.name), log, css("--lightness")], x: "step", y: kind, log, own: true, data,
    series: told.map(([run], k) => line(run.name.slice(0, 60), shade(k), { spanGaps: true })) };
}
