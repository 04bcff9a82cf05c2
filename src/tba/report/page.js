"use strict";
// Text from the run enters the page through textContent only; text for Plotly, which reads tags, is escaped first.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const symbols = ["circle", "square", "diamond", "triangle-up"];
  const narrow = () => document.documentElement.clientWidth < 600;
  const calm = { displayModeBar: false, displaylogo: false, showTips: false };

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function plain(text) {
    return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function axis(title, more) {
    return Object.assign({
      title: { text: plain(title), standoff: 8 }, automargin: true, gridcolor: colour("rule"), zerolinecolor: colour("rule"),
      linecolor: colour("quiet"), fixedrange: matchMedia("(pointer: coarse)").matches
    }, more);
  }

  function layout(x, y, more) {
    return Object.assign({
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("text"), size: 12, family: "system-ui, sans-serif" },
      margin: { l: 48, r: 12, t: 12, b: 40 }, xaxis: x, yaxis: y, hovermode: "x unified",
      hoverlabel: { bgcolor: colour("back"), bordercolor: colour("rule"), font: { color: colour("text") } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" }
    }, more);
  }

  function timeUnit(tables) {
    const longest = Math.max(0, ...tables.flatMap((table) => data.columns[table].wall_s.filter((s) => s !== null)));
    return longest > 7200 ? ["hours", 3600] : longest > 300 ? ["minutes", 60] : ["s", 1];
  }

  function drawLines(spec, axisName) {
    const isOverK = spec.x === "k";
    const along = spec.x === "wall_s" ? "wall_s" : isOverK ? "step" : axisName;
    const [unit, seconds] = timeUnit(spec.lines.map((line) => line.table));
    const traces = spec.lines.map((line) => {
      const table = data.columns[line.table];
      const x = along === "wall_s" ? table.wall_s.map((s) => s === null ? null : s / seconds) : table.step;
      const shade = colour("line-" + line.style % 4);
      const pattern = (line.style + Math.floor(line.style / 4)) % 4;
      return {
        type: "scatter", name: plain(line.name), x: x, y: table[line.y], connectgaps: true, opacity: line.raw && spec.lines.length > 1 ? 0.6 : 1,
        mode: line.marks ? "lines+markers" : "lines", marker: { size: 7, symbol: symbols[pattern], color: shade },
        line: { color: shade, width: line.raw ? 1.5 : 2, dash: dashes[pattern] },
        hovertemplate: "%{y:.4~g}"
      };
    });
    const y = axis(spec.unit, spec.share ? { range: [-0.02, 1.02] } : { rangemode: spec.zero ? "tozero" : "normal" });
    const x = isOverK
      ? axis("k (completions)", { type: "log", tickvals: [...new Set(traces.flatMap((trace) => trace.x))] })
      : axis(along === "wall_s" ? "time (" + unit + ")" : "step", { hoverformat: along === "wall_s" ? ".1f" : "" });
    return [traces, layout(x, y, { showlegend: spec.lines.length > 1 })];
  }

  function drawHeat(spec) {
    const trace = {
      type: "heatmap", x: spec.x, y: spec.labels, z: spec.z, colorscale: [[0, colour("low")], [1, colour("high")]], zmin: 0,
      hoverongaps: false, hovertemplate: "step %{x}<br>age %{y}<br>share %{z:.3f}<extra></extra>",
      colorbar: { title: { text: "share", side: "right" }, thickness: 10, outlinewidth: 0 }
    };
    return [[trace], layout(axis("step"), axis(spec.unit, { type: "category", nticks: 10, showgrid: false }),
      { hovermode: "closest" })];
  }

  function drawBars(spec) {
    const trace = {
      type: "bar", x: spec.labels, y: spec.y, marker: { color: colour("line-0") },
      hovertemplate: "age %{x}: %{y:,}<extra></extra>"
    };
    return [[trace], layout(axis(spec.x_unit, { type: "category", nticks: narrow() ? 8 : 16 }), axis(spec.unit),
      { hovermode: "closest", bargap: 0.15 })];
  }

  function drawCharts() {
    const chosen = document.querySelector("input[name=axis]:checked");
    const axisName = chosen ? chosen.value : "step";
    for (const [id, spec] of Object.entries(data.charts)) {
      const draw = { lines: drawLines, heat: drawHeat, bars: drawBars }[spec.kind];
      const [traces, frame] = draw(spec, axisName);
      Plotly.react(byId("plot-" + id), traces, frame, calm);
    }
  }

  function startCharts() {
    if (Object.keys(data.charts).length === 0) { return; }
    byId("axis-form").hidden = false;
    byId("axis-form").addEventListener("change", drawCharts);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
    drawCharts();
    const plots = Object.keys(data.charts).map((id) => byId("plot-" + id));
    const fit = new ResizeObserver((entries) => requestAnimationFrame(() => {
      entries.forEach((entry) => Plotly.Plots.resize(entry.target));
    }));
    plots.forEach((plot) => fit.observe(plot));
  }

  function made(tag, className, text) {
    const element = document.createElement(tag);
    if (className) { element.className = className; }
    if (text !== undefined) { element.textContent = text; }
    return element;
  }

  function shortNumber(value) {
    return value === null ? "not known" : Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 4 });
  }

  function completionItem([text, reward, logp, finish]) {
    const item = made("li");
    const line = made("p", "quiet", "reward ");
    line.append(made("b", "", shortNumber(reward)),
      ", log-prob " + shortNumber(logp) + " nats, ended by " + (finish || "not known"));
    const body = made("div", "text", text);
    body.dir = "auto";
    item.append(line, body);
    return item;
  }

  function article(answered) {
    const element = made("article", "answered");
    const title = made("h3", "", "version " + answered.version + ", prompt ");
    title.append(made("bdi", "", answered.prompt_id));
    const prompt = made("div", "text prompt", answered.prompt);
    prompt.dir = "auto";
    const list = made("ol");
    list.append(...answered.completions.map(completionItem));
    element.append(title, prompt, list);
    return element;
  }

  function wanted() {
    const version = Number(byId("browse-version").value);
    const promptId = byId("browse-prompt").value;
    const needle = byId("browse-filter").value.toLowerCase();
    const order = byId("browse-order").value;
    const holds = (text) => text.toLowerCase().includes(needle);
    const chosen = [];
    for (const one of data.answered) {
      if (promptId === "" ? one.version !== version : "=" + one.prompt_id !== promptId) { continue; }
      let completions = needle === "" || holds(one.prompt) ? one.completions : one.completions.filter((c) => holds(c[0]));
      if (completions.length === 0 && needle !== "" && !holds(one.prompt)) { continue; }
      if (order !== "file") {
        const sign = order === "low" ? 1 : -1;
        const last = order === "low" ? Infinity : -Infinity;
        const key = (c) => c[1] === null ? last : c[1];
        completions = completions.slice().sort((a, b) => key(a) === key(b) ? 0 : sign * (key(a) - key(b)));
      }
      chosen.push(Object.assign({}, one, { completions: completions }));
    }
    if (order !== "file" && promptId === "") {
      const mean = (one) => {
        const known = one.completions.map((c) => c[1]).filter((r) => r !== null);
        return known.length ? known.reduce((a, b) => a + b, 0) / known.length : (order === "low" ? Infinity : -Infinity);
      };
      const sign = order === "low" ? 1 : -1;
      chosen.sort((a, b) => mean(a) === mean(b) ? 0 : sign * (mean(a) - mean(b)));
    }
    return chosen;
  }

  function showCompletions(limit) {
    const chosen = wanted();
    const onePrompt = byId("browse-prompt").value !== "";
    byId("browse-version").disabled = onePrompt;
    byId("browse-list").replaceChildren(...chosen.slice(0, limit).map(article));
    const shown = Math.min(limit, chosen.length);
    byId("browse-count").textContent = onePrompt
      ? "One prompt, newest version first: " + shown + " of " + chosen.length + " versions."
      : "Version " + byId("browse-version").value + ": " + shown + " of " + chosen.length + " prompts.";
    byId("browse-more-line").hidden = shown === chosen.length;
    return shown;
  }

  function startBrowser() {
    if (data.answered.length === 0) { return; }
    const prompts = byId("browse-prompt");
    const all = made("option", "", "all");
    all.value = "";
    prompts.append(all);
    for (const id of new Set(data.answered.map((one) => one.prompt_id))) {
      const option = made("option", "", id.length > 60 ? id.slice(0, 60) + "…" : id);
      option.value = "=" + id;
      prompts.append(option);
    }
    let limit = data.shown;
    const restart = () => { limit = data.shown; showCompletions(limit); };
    for (const id of ["browse-version", "browse-prompt", "browse-order"]) { byId(id).addEventListener("change", restart); }
    byId("browse-filter").addEventListener("input", restart);
    byId("browse-form").addEventListener("submit", (event) => event.preventDefault());
    byId("browse-more").addEventListener("click", () => { limit += data.shown; showCompletions(limit); });
    byId("browse-form").hidden = false;
    restart();
  }

  startCharts();
  startBrowser();
})();
