// The samples: filters, and cards that are made as they scroll into view.

const BATCH = 25;
const COLORINGS = {
  mask: "what is trained",
  advantage: "advantage",
  gap: "log-prob gap (trainer - rollout engine)",
  surprise: "surprise (-log-prob)",
  entropy: "entropy of the policy",
};
const HEATS = ["surprise", "entropy"];  // never below 0
const TINY = 1e-12;  // a largest value below it is 0
const ORDERS = {
  saved: "as saved",
  worst: "lowest score first",
  best: "highest score first",
  longest: "longest first",
  random: "random",
};

function rgb(name, strength) {
  return `rgb(var(--${name}) / ${Math.min(1, Math.max(0, strength)).toFixed(2)})`;
}

// Value per response token for a coloring, or null if the sample does not have it.
function tokenValues(tokens, coloring) {
  const sampled = tokens.sampled ?? "1".repeat(tokens.text.length);
  const own = (i) => sampled[i] === "1";
  if (coloring === "advantage" && tokens.advantage !== undefined) {
    const one = tokens.advantage;
    return tokens.text.map((_, i) => (own(i) ? (Array.isArray(one) ? one[i] : one) : null));
  }
  const engine = tokens.rollout_log_prob, trainer = tokens.log_prob;
  if (coloring === "gap" && engine && trainer) return tokens.text.map((_, i) => (own(i) ? trainer[i] - engine[i] : null));
  if (coloring === "entropy" && tokens.entropy) return tokens.text.map((_, i) => (own(i) ? tokens.entropy[i] : null));
  if (coloring === "surprise" && (engine || trainer)) return tokens.text.map((_, i) => (own(i) ? -(trainer ?? engine)[i] : null));
  return null;
}

function tokenTitle(tokens, i) {
  const lines = [`token ${i}  id ${tokens.id[i]}  ${JSON.stringify(tokens.text[i])}`];
  const at = (name) => (Array.isArray(tokens[name]) ? tokens[name][i] : tokens[name]);
  if (tokens.sampled && tokens.sampled[i] === "0") lines.push("tool text, or a failed row");
  else {
    if (tokens.trained && tokens.trained[i] === "0") lines.push("not trained");
    for (const [name, label] of [["rollout_log_prob", "log-prob, rollout engine"], ["log_prob", "log-prob, trainer"], ["entropy", "entropy, nats"], ["advantage", "advantage"]]) {
      if (at(name) !== undefined) lines.push(`${label}  ${format(at(name))}`);
    }
  }
  return lines.join("\n");
}

function maskColor(tokens, i) {
  if (tokens.sampled && tokens.sampled[i] === "0") return "var(--tool)";
  return tokens.trained && tokens.trained[i] === "0" ? "var(--sampled)" : "var(--trained)";
}

function largestValue(values) { return (values ?? []).reduce((most, value) => Math.max(most, Math.abs(value ?? 0) || 0), TINY); }

// The response as colored tokens. `largest` is the value with the full color, the same for the whole page.
function tokenText(sample, coloring, largest) {
  const tokens = sample.tokens;
  const values = tokenValues(tokens, coloring);
  const text = element("p", { class: "text response mono" });
  const { starts } = placesOf(sample.requests ?? []);
  tokens.text.forEach((piece, i) => {
    if (starts.has(i)) text.append(element("span", { class: "label branch" }, starts.get(i)));
    let color = null;
    if (coloring === "mask") color = maskColor(tokens, i);
    else if (values && values[i] === null) color = "var(--tool)";
    else if (values && HEATS.includes(coloring)) color = rgb("heat", values[i] / Math.max(largest, 1));
    else if (values) color = rgb(values[i] > 0 ? "plus" : "minus", Math.abs(values[i]) / largest * 0.75);
    const shown = element("span", color ? { style: `background:${color}` } : {}, piece);
    shown.dataset.i = i;
    text.append(shown);
  });
  text.addEventListener("pointermove", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) tip.hide(); else tip.show(event, tokenTitle(tokens, +i));
  });
  text.addEventListener("pointerleave", tip.hide);
  return [text, without(coloring, values)];
}

// The requests of an agent program as a tree: under each those that continue it.
function requestGraph(requests, advantage) {
  const { firsts } = placesOf(requests);
  const list = () => element("ul", { class: "requests" });
  const root = list(), nodes = new Map();
  requests.forEach((request, i) => {
    const words = [`turn ${i + 1}`];
    if (request.root && request.root !== "first") words.push(`${request.root} conversation`);
    words.push(`${request.given} given`, `${request.sampled} sampled`);
    const own = Array.isArray(advantage) ? advantage[firsts[i]] : advantage;
    if (own !== undefined) words.push(`advantage ${format(own)}`);
    else if (request.credit !== 1) words.push(`advantage x ${format(request.credit)}`);
    const item = element("li", {}, words.join(", "));
    const parent = nodes.get(request.parent);
    if (parent && !parent.list) { parent.list = list(); parent.item.append(parent.list); }
    (parent ? parent.list : root).append(item);
    nodes.set(request.request, { item });
  });
  return root;
}

// In the response tokens: the first of each branch but the first, with its name, and the first that each request sampled.
function placesOf(requests) {
  const starts = new Map(), firsts = [];
  let at = 0, before = requests[0]?.branch;
  requests.forEach((request, i) => {
    if (request.branch !== before) { starts.set(at, `branch ${request.branch + 1}, turn ${i + 1}`); at += request.context; }
    else if (i) at += request.given;
    firsts.push(at);
    at += request.sampled;
    before = request.branch;
  });
  return { starts, firsts };
}

function swatch(color, label) {
  return element("span", { class: "scale" }, element("span", { class: "swatch", style: `background:${color}` }), label);
}

// Why a sample has no colors, if so.
function without(coloring, values) {
  if (coloring === "mask") return "";
  if (!values) return element("div", { class: "label" }, `This run has no ${COLORINGS[coloring]} per token.`);
  if (largestValue(values) <= TINY) return element("div", { class: "label" }, `${COLORINGS[coloring]}: 0 for every sampled token.`);
  return "";
}

// What the colors mean, for all samples of the page.
function scale(coloring, largest) {
  if (coloring === "mask") return [swatch("var(--trained)", "trained"), swatch("var(--sampled)", "sampled, not trained"), swatch("var(--tool)", "tool")];
  if (largest <= TINY) return [];
  const note = `${COLORINGS[coloring]}, one scale for all samples`;
  if (HEATS.includes(coloring)) return [swatch(rgb("heat", 0.05), "0"), swatch(rgb("heat", 1), `${format(Math.max(largest, 1))} nats`), note];
  return [swatch(rgb("minus", 0.75), format(-largest)), swatch(rgb("plus", 0.75), `+${format(largest)}`), note];
}

function plainText(sample) {
  const text = element("p", { class: "text response mono" });
  const parts = Array.isArray(sample.transcript) ? sample.transcript : [["model", sample.response]];
  for (const [author, words] of parts) {
    text.append(element("span", { class: author === "model" ? "" : "part-tool" }, String(words)));
  }
  return [text];
}

function answer(truth) {
  const target = truth !== null && typeof truth === "object" && "target" in truth ? truth.target : truth;
  if (Array.isArray(target)) return target.map(String).join(" | ");
  return typeof target === "object" ? JSON.stringify(target) : String(target);
}

function sampleCard(sample, run, severalRuns, coloring, largest) {
  const fact = (text, style = "dim") => element("span", { class: style }, text);
  const facts = element("div", { class: "facts" });
  if (severalRuns) facts.append(fact(run.name));
  const failed = sample.score === null;
  facts.append(
    element("b", { class: failed ? "bad" : sample.score > 0 ? "good" : "warn" }, failed ? "no score" : `score ${format(sample.score)}`),
    fact(`step ${sample.step}${sample.validation ? ", validation" : ""}`),
  );
  for (const [name, value] of Object.entries(sample.reward_parts ?? {})) facts.append(fact(`${name} ${format(value)}`));
  if (sample.chosen && sample.chosen !== "all") facts.append(fact(`chosen: ${sample.chosen}`));
  facts.append(fact(`status ${sample.status}`, sample.status === "done" ? "dim" : "warn"), fact(String(sample.data_source)), fact(`prompt ${sample.index}`));
  facts.append(fact(`${sample.response_tokens} tokens`));
  if (sample.trained_tokens !== sample.response_tokens && sample.trained_tokens !== undefined) facts.append(fact(`${sample.trained_tokens} trained`));
  if (sample.weight_version !== undefined) facts.append(fact(`weights ${sample.weight_version}`));
  const label = (text) => element("div", { class: "label" }, text);
  const card = element("article", { class: "card sample" }, facts);
  const requests = sample.requests ?? [];
  const log = sample.agent_log && element("div", {}, label("log of the agent"), element("p", { class: "text dim mono" }, sample.agent_log));
  const isGraph = requests.some((request) => request.branch);
  if (isGraph) card.append(element("div", { class: "beside" }, element("div", {}, label("requests"), requestGraph(requests, sample.tokens?.advantage)), log || ""));
  card.append(label("prompt"), element("p", { class: "text prompt mono" }, String(sample.prompt)));
  card.append(label("response"), ...(sample.tokens ? tokenText(sample, coloring, largest) : plainText(sample)));
  for (const info of sample.turn_infos ?? []) {
    if (info && info.called) {
      const words = ["action", "query", "seconds", "retries", "cached"].filter((key) => info[key]).map((key) => `${key} ${format(info[key])}`);
      card.append(label(words.join("   ")));
    }
  }
  if (log && !isGraph) card.append(log);
  if (sample.error) card.append(element("p", { class: "text bad mono" }, String(sample.error)));
  card.append(label("expected"), element("p", { class: "text mono" }, answer(sample.ground_truth)));
  return card;
}

function options(select, values, chosen) {
  for (const [value, label] of values) {
    select.append(element("option", { value, selected: String(value) === String(chosen) }, label));
  }
  return select;
}

// The section: controls, and the cards of the samples that pass all of them.
function showSamples(section, runs, samplesOfRuns, state) {
  const all = samplesOfRuns.flatMap((samples, number) => samples.map((sample) => ({ sample, run: runs[number] })));
  if (!all.length) {
    section.append(element("p", { class: "dim" }, "No samples were saved. Training with rewards saves trainer.rollouts_per_step of each step."));
    return;
  }
  const distinct = (value) => [...new Set(all.map(value))].filter((one) => one !== "").sort((a, b) => (a > b ? 1 : -1));
  const newest = Math.min(...samplesOfRuns.filter((samples) => samples.length).map((samples) => Math.max(...samples.map((sample) => sample.step))));
  const any = (name) => [["", `every ${name}`]];
  const same = (values, label = "") => values.map((value) => [value, label + value]);
  const choice = ({ sample }) => (sample.chosen === "all" ? "" : sample.chosen ?? "");
  const fields = {
    run: [any("run").concat(runs.map((run) => [run.name, run.name])), ({ run }) => run.name],
    kind: [[["", "training and validation"], ["training", "training"], ["validation", "validation"]], ({ sample }) => (sample.validation ? "validation" : "training")],
    step: [any("step").concat(same(distinct(({ sample }) => sample.step), "step ")), ({ sample }) => sample.step],
    source: [any("data source").concat(same(distinct(({ sample }) => sample.data_source))), ({ sample }) => sample.data_source],
    status: [any("status").concat(same(distinct(({ sample }) => sample.status))), ({ sample }) => sample.status],
    chosen: [any("choice").concat(same(distinct(choice), "chosen: ")), choice],
  };
  state.step ??= newest;
  state.kind ??= all.some(({ sample }) => !sample.validation) ? "training" : "";
  const controls = element("div", { class: "controls" });
  const list = element("div", { class: "cards" });
  const count = element("p", { class: "dim" });
  const changed = (name) => (event) => { state[name] = event.target.value; remember(state); fill(); };
  for (const [name, [values, value]] of Object.entries(fields)) {
    if (new Set(all.map(value)).size < 2) { state[name] = ""; continue; }
    controls.append(options(element("select", { id: `samples-${name}`, "aria-label": name, onchange: changed(name) }), values, state[name] ?? ""));
  }
  controls.append(
    options(element("select", { id: "samples-order", "aria-label": "order", onchange: changed("order") }), Object.entries(ORDERS), state.order),
    element("input", { id: "samples-search", type: "search", placeholder: "text to find", value: state.text ?? "", oninput: changed("text") }),
    element("label", {}, "color by", options(element("select", { id: "samples-coloring", onchange: changed("coloring") }), Object.entries(COLORINGS), state.coloring)),
  );
  const colors = element("div", { class: "legend", id: "samples-scale" });
  const withTokens = all.map(({ sample }) => sample.tokens).filter(Boolean);
  const coloring = () => state.coloring ?? "mask";
  let largest = TINY;
  const more = element("div", {}, "");
  section.append(controls, colors, count, list, more);
  let found = [], shown = 0;

  function passes(entry) {
    for (const [name, [, value]] of Object.entries(fields)) {
      if ((state[name] ?? "") !== "" && String(value(entry)) !== String(state[name])) return false;
    }
    if (!state.text) return true;
    const words = state.text.toLowerCase();
    return [entry.sample.prompt, entry.sample.response, answer(entry.sample.ground_truth)].some((text) => String(text).toLowerCase().includes(words));
  }

  function sorted(entries) {
    const score = ({ sample }) => sample.score ?? -Infinity;
    if (state.order === "worst") return entries.sort((a, b) => (score(a) < score(b) ? -1 : score(a) > score(b) ? 1 : 0));
    if (state.order === "best") return entries.sort((a, b) => (score(a) > score(b) ? -1 : score(a) < score(b) ? 1 : 0));
    if (state.order === "longest") return entries.sort((a, b) => b.sample.response_tokens - a.sample.response_tokens);
    if (state.order === "random") return entries.map((entry) => [Math.random(), entry]).sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
    return entries;
  }

  function fill() {
    found = sorted(all.filter(passes));
    shown = 0;
    list.replaceChildren();
    largest = withTokens.reduce((most, tokens) => Math.max(most, largestValue(tokenValues(tokens, coloring()))), TINY);
    colors.replaceChildren(...scale(coloring(), largest));
    colors.hidden = !withTokens.length;
    count.textContent = `${found.length} of ${all.length} samples`;
    next();
  }

  function next() {
    for (const { sample, run } of found.slice(shown, shown + BATCH)) {
      let card;
      try { card = sampleCard(sample, run, runs.length > 1, coloring(), largest); }
      catch (error) { card = element("article", { class: "card sample warn" }, `step ${sample.step}: this sample is malformed: ${error.message}`); }
      list.append(card);
    }
    shown = Math.min(found.length, shown + BATCH);
  }

  new IntersectionObserver((entries) => { if (entries[0].isIntersecting && shown < found.length) next(); }, { rootMargin: "600px" }).observe(more);
  fill();
}
