// The page: read the data, then fill the sections.

const FIRST = [
  ["critic/score/mean", "Mean score of the step's samples."],
  ["response_length/mean", "Tokens of a response."],
  ["response_length/clip_ratio", "Share of responses that were cut at data.max_response_length."],
  ["rollout/zero_variance_groups", "Share of prompts whose samples all have the same score, so that they give no gradient."],
  ["actor/entropy", "Mean entropy of the policy per token, in nats."],
  ["actor/grad_norm", "Gradient norm before clipping."],
  ["actor/pg_loss", "Policy-gradient loss."],
  ["actor/ppo_kl", "Mean difference of log-probs between the old and the updated policy."],
  ["actor/kl_loss", "KL divergence from the reference policy."],
  ["actor/pg_clipfrac", "Share of tokens whose ratio was clipped."],
  ["critic/vf_loss", "Loss of the critic."],
  ["training/log_prob_gap", "Mean absolute difference of log-probs between the trainer and the rollout engine."],
  ["async/age/mean", "Mean age of the trained tokens, in weight versions."],
  ["async/length_distance", "Distance between the lengths of trained and of sampled responses."],
  ["fully_async/trainer/idle_ratio", "Share of a step in which the trainer waits for samples."],
  ["fully_async/rollouter/idle_ratio", "Share of the time in which the engines generate nothing."],
  ["training/rollout_eff_sample_size_token", "Effective sample size of the importance weights, as a share of the tokens."],
  ["actor/lr", "Learning rate."],
  ["perf/time_per_step", "Seconds per step."],
  ["perf/throughput", "Tokens per second and device."],
];
const SPREAD = { "critic/score": "Scores of a step", "response_length": "Response lengths of a step" };

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);  // Uint8Array.from takes a second longer for 10 MB
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// What the reader chose outlasts a reload of a watched page.
function remember(state) {
  try { sessionStorage.setItem("verlite-report", JSON.stringify(state)); } catch { /* not permitted for files in this browser */ }
}
function remembered() {
  const address = new URLSearchParams(location.search);  // ?coloring=advantage&order=worst links to a view
  try { return { ...JSON.parse(sessionStorage.getItem("verlite-report")), ...Object.fromEntries(address) }; } catch { return Object.fromEntries(address); }
}

function points(run, key, from = "metrics") {
  const values = run[from][key] ?? [];
  return run.steps.map((step, i) => [step, values[i]]).filter(([, value]) => typeof value === "number");
}
function series(runs, key) {
  return runs.map((run) => ({ name: run.name, color: run.color, points: points(run, key), marks: run.warnings, bands: [[points(run, key, "low"), points(run, key, "high")]] }));
}
// The scores or lengths of a step's samples: the median and two bands.
function spread(run, prefix) {
  const of = (name, from) => points(run, `${prefix}/${name}`, from);
  const low = (name) => (of(name, "low").length ? of(name, "low") : of(name));
  const high = (name) => (of(name, "high").length ? of(name, "high") : of(name));
  const middle = of("p50");
  return { name: run.name, color: run.color, points: middle.length ? middle : of("mean"), bands: [[low("min"), high("max")], [of("p10"), of("p90")]] };
}
function has(runs, key) { return runs.some((run) => points(run, key).length); }
function last(list) { return list[list.length - 1]; }
function mean(list) { return list.reduce((sum, value) => sum + value, 0) / list.length; }

function showOverview(section, runs) {
  const validations = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => /^val-core\/.*\/mean@\d+$/.test(key));
  const rows = [
    ["steps", (run) => (run.steps.length ? `${run.steps[0]} to ${last(run.steps)}` : "none yet")],
    ["time", (run) => (run.started ? period(run.started, run.ended) : null)],
    ["planned steps", (run) => run.total_steps ?? run.config["trainer.total_training_steps"] ?? null],
    ["planned epochs", (run) => run.config["trainer.total_epochs"] ?? null],
    ["resumed at step", (run) => resumes(run)],
    ["model", (run) => run.config["actor_rollout_ref.model.path"] ?? run.config["model.path"] ?? null],
    ["estimator", (run) => run.config["algorithm.adv_estimator"] ?? null],
    ["training data", (run) => run.config["data.train_files"] ?? null],
    ["score, first to last 10%", (run) => change(points(run, "critic/score/mean"))],
    ...validations.map((key) => [key.replace(/^val-core\//, "held out: "), (run) => change(points(run, key), true)]),
    ["response length, first to last 10%", (run) => change(points(run, "response_length/mean"))],
    ["share cut at the limit, last 10%", (run) => tail(points(run, "response_length/clip_ratio"))],
    ["entropy, first to last 10%", (run) => change(points(run, "actor/entropy"))],
    ["log-prob gap, largest", (run) => largest(points(run, "training/log_prob_gap"))],
    ["seconds per step, median", (run) => median(points(run, "perf/time_per_step"))],
    ["training loss, first to last 10%", (run) => change(points(run, "train/loss"))],
    ["held-out loss, first to last", (run) => change(points(run, "val/loss"), true)],
    ["samples saved", (run) => run.n_samples],
  ];
  const known = rows.map(([name, value]) => [name, runs.map(value)]).filter(([, values]) => values.some((one) => one !== null));
  const text = (one) => (one === null ? "-" : typeof one === "object" ? JSON.stringify(one) : typeof one === "number" ? format(one) : String(one));
  if (runs.length === 1) {  // columns, so that the curves are on the first screen
    const facts = known.map(([name, [value]]) => element("div", {}, element("dt", {}, name), " ", element("dd", {}, text(value))));
    section.append(element("dl", { class: "card facts-of-run" }, ...facts));
  } else {
    const table = element("table", {}, element("tr", {}, element("th", {}, ""), ...runs.map((run) =>
      element("th", {}, element("span", { class: "dot", style: `background:${run.color}` }), run.name))));
    for (const [name, values] of known) table.append(element("tr", {}, element("th", {}, name), ...values.map((one) => element("td", {}, text(one)))));
    section.append(element("div", { class: "card scroll summary" }, table));
  }
  for (const run of runs) {
    if (run.error) section.append(element("p", { class: "text bad mono" }, `${run.name} ended with an error: ${run.error}`));
    for (const warning of run.warnings) section.append(element("p", { class: "warn" }, `${runs.length > 1 ? `${run.name}, ` : ""}step ${warning.step}: ${warning.text}`));
    for (const note of run.notes) section.append(element("p", { class: "warn" }, `${run.name}: ${note}`));
  }
}

function resumes(run) {
  if (!run.segments.length) return null;
  const steps = run.segments.map((segment) => segment.step), shown = steps.slice(-8).join(", ");
  return steps.length > 8 ? `${steps.length} times, at last ${shown}` : shown;
}

function clock(seconds) {
  const at = new Date(seconds * 1000), two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

function period(first, last) {
  const start = clock(first), end = clock(last), [day, time] = end.split(" ");
  return `${start} to ${start.startsWith(day) ? time : end}`;
}

function change(found, single = false) {
  if (!found.length) return null;
  const values = found.map((point) => point[1]);
  const part = single ? 1 : Math.max(1, Math.floor(values.length / 10));
  return `${format(mean(values.slice(0, part)))} \u2192 ${format(mean(values.slice(-part)))}`;
}
function tail(found) { return found.length ? mean(found.slice(-Math.max(1, Math.floor(found.length / 10))).map((point) => point[1])) : null; }
function largest(found) { return found.length ? found.reduce((best, [, value]) => Math.max(best, value), -Infinity) : null; }
function median(found) {
  if (!found.length) return null;
  const values = found.map((point) => point[1]).sort((a, b) => a - b);
  return values[Math.floor(values.length / 2)];
}

function showCurves(section, runs, state) {
  const every = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => has(runs, key));
  const smoothing = element("input", { id: "smoothing", type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing ?? 0 });
  const search = element("input", { id: "metric-search", type: "search", placeholder: "name of a metric" });
  const place = element("div", {});
  if (runs.length > 1) section.append(legend(runs));
  section.append(element("div", { class: "controls" }, element("label", {}, "smoothing", smoothing), search), place);
  const chart = (key, note) => lineChart(key, series(runs, key), { smoothing: +(state.smoothing ?? 0), note });
  const grid = (keys) => element("div", { class: "grid" }, ...keys.map((key) => chart(key)));

  function draw() {
    const words = search.value.trim().toLowerCase();
    if (words) {
      const found = every.filter((key) => key.toLowerCase().includes(words));
      place.replaceChildren(found.length ? grid(found.slice(0, 60)) : element("p", { class: "dim" }, "No metric has this name."));
      return;
    }
    const validations = every.filter((key) => /^val-core\/.*\/mean@\d+$/.test(key)).map((key) => [key, "Mean score on held-out prompts."]);
    const important = [FIRST[0], ...validations, ...FIRST.slice(1), ...every.filter((key) => /^(train|val)\/(loss|lr|grad_norm)$/.test(key)).map((key) => [key, ""])];
    const top = element("div", { class: "grid" });
    for (const [key, note] of important) {
      if (!has(runs, key)) continue;
      const card = chart(key, note);
      if (note) card.append(element("div", { class: "label" }, note));
      top.append(card);
    }
    for (const [prefix, title] of Object.entries(SPREAD)) if (has(runs, `${prefix}/max`)) {
      const card = lineChart(title, runs.map((run) => spread(run, prefix)));
      const line = has(runs, `${prefix}/p50`) ? "the median. The inner band has eight tenths of the samples" : "the mean";
      card.append(element("div", { class: "label" }, `The line is ${line}, the outer band all of them.`));
      top.append(card);
    }
    place.replaceChildren(top);
    const groups = Map.groupBy ? Map.groupBy(every, (key) => key.split("/")[0]) : every.reduce((map, key) => map.set(key.split("/")[0], [...(map.get(key.split("/")[0]) ?? []), key]), new Map());
    for (const [name, keys] of [...groups].sort()) {
      const box = element("details", { "data-group": name }, element("summary", {}, `${name} (${keys.length})`));
      box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(grid(keys.sort())); });
      place.append(box);
    }
  }
  smoothing.addEventListener("input", () => { state.smoothing = +smoothing.value; remember(state); draw(); });
  search.addEventListener("input", draw);
  draw();
}

function showTime(section, runs) {
  let shown = false;
  const grid = element("div", { class: "grid" });
  for (const run of runs) {
    const keys = Object.keys(run.metrics).filter((key) => key.startsWith("timing_s/") && key !== "timing_s/step" && points(run, key).some(([, value]) => value > 0.001));
    if (!keys.length) continue;
    shown = true;
    const totals = new Map(keys.map((key) => [key, points(run, key).reduce((sum, [, value]) => sum + value, 0)]));
    keys.sort((a, b) => totals.get(b) - totals.get(a));
    const parts = keys.slice(0, COLORS.length - 1).map((key, i) => ({ name: key.slice("timing_s/".length), color: COLORS[i], values: new Map(points(run, key)) }));
    if (parts.length < keys.length) {
      const values = new Map();
      for (const key of keys.slice(parts.length)) for (const [step, value] of points(run, key)) values.set(step, (values.get(step) ?? 0) + value);
      parts.push({ name: "other", color: COLORS[parts.length], values });
    }
    grid.append(stackedChart(`Seconds of each phase: ${run.name}`, parts));
    const all = [...totals.values()].reduce((a, b) => a + b, 0);
    const table = element("table", { class: "phases" }, element("tr", {}, element("th", {}, "phase"), element("th", { class: "number" }, "share"), element("th", { class: "number" }, "mean s per step")));
    for (const key of keys) {
      table.append(element("tr", {}, element("td", {}, key.slice("timing_s/".length)), element("td", { class: "number" }, `${(100 * totals.get(key) / all).toFixed(1)}%`), element("td", { class: "number" }, format(totals.get(key) / run.steps.length))));
    }
    grid.append(element("div", { class: "card" }, element("h3", {}, `Time split: ${run.name}`), table));
  }
  const memory = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) => /(memory|rss).*gb/.test(key) && has(runs, key));
  for (const key of memory.slice(0, 24)) grid.append(lineChart(key, series(runs, key)));
  section.append(shown || memory.length ? grid : element("p", { class: "dim" }, "No timings were saved."));
}

// What changed at each resume. Resumes without a change are left out.
function showChanges(section, runs) {
  for (const run of runs) {
    const rows = run.segments.flatMap(({ step, changes }) => changes.map((change) => [step, ...change]));
    if (!rows.length) continue;
    const head = element("tr", {}, ...["from step", "key", "before", "now"].map((name) => element("th", {}, name)));
    const table = element("table", { class: "changes" }, head);
    for (const [step, ...change] of rows) table.append(element("tr", {}, element("td", {}, String(step)), ...change.map((text) => element("td", { class: "mono" }, text))));
    section.append(element("div", { class: "card scroll" }, element("h3", {}, `Changed when ${run.name} resumed`), table));
  }
}

function showSettings(section, runs) {
  showChanges(section, runs);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const text = (run, key) => (key in run.config ? JSON.stringify(run.config[key]) : "-");
  const differs = (key) => new Set(runs.map((run) => text(run, key))).size > 1;
  const different = keys.filter(differs);
  const search = element("input", { id: "setting-search", type: "search", placeholder: "name of a setting" });
  const only = element("input", { id: "only-different", type: "checkbox" });
  only.checked = runs.length > 1 && different.length > 0;
  const table = element("table", {});
  const controls = element("div", { class: "controls" }, search);
  if (runs.length > 1) controls.append(element("label", {}, only, `only the ${different.length} that differ`));
  section.append(controls, element("div", { class: "card scroll" }, table));
  function fill() {
    const words = search.value.trim().toLowerCase();
    table.replaceChildren(element("tr", {}, element("th", {}, "key"), ...runs.map((run) => element("th", {}, run.name))));
    for (const key of only.checked ? different : keys) {
      if (words && !key.toLowerCase().includes(words)) continue;
      table.append(element("tr", { class: runs.length > 1 && differs(key) ? "differs" : "" }, element("td", { class: "mono" }, key), ...runs.map((run) => element("td", { class: "mono" }, text(run, key)))));
    }
  }
  search.addEventListener("input", fill);
  only.addEventListener("change", fill);
  fill();
}

async function main() {
  const data = await unpack("overview-data");
  const runs = data.runs;
  runs.forEach((run, number) => { run.color = COLORS[number % COLORS.length]; });
  const state = remembered();
  const title = runs.map((run) => run.name).join(" and ");
  document.title = `${title} - verlite report`;
  document.querySelector("h1").textContent = runs.length > 3 ? `${runs.length} runs` : title;
  document.getElementById("about").textContent = `verlite ${data.version}, ${data.made}`;
  const section = (id) => document.getElementById(id);
  showOverview(section("overview"), runs);
  showCurves(section("curves"), runs, state);
  showTime(section("time"), runs);
  showSettings(section("settings"), runs);
  showSamples(section("samples"), runs, await unpack("samples-data"), state);
  if (data.reload_s) setTimeout(() => location.reload(), data.reload_s * 1000);
  document.body.dataset.ready = "yes";
}
main().catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "bad" }, `This page cannot be shown: ${error}. It needs a browser of 2023 or newer.`));
});
