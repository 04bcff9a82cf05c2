"use strict";
// Draws charts. Text for Plotly, which reads tags, is escaped first.
const charts = (function () {
  let specs = {};
  let columns = {};
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const symbols = ["circle", "square", "diamond", "triangle-up"];
  const narrow = () => document.documentElement.clientWidth < 600;
  const calm = { displayModeBar: false, displaylogo: false, showTips: false };
  const plotOf = (id) => document.getElementById("plot-" + id);
  const drawers = { lines: drawLines, heat: drawHeat, bars: drawBars };
  const fit = new ResizeObserver((entries) => requestAnimationFrame(() => {
    entries.filter((entry) => entry.target.data).forEach((entry) => Plotly.Plots.resize(entry.target));
  }));

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
    const longest = Math.max(0, ...tables.flatMap((table) => columns[table].wall_s.filter((s) => s !== null)));
    return longest > 7200 ? ["hours", 3600] : longest > 300 ? ["minutes", 60] : ["s", 1];
  }

  function drawLines(spec, axisName) {
    const isOverK = spec.x === "k";
    const along = spec.x === "wall_s" ? "wall_s" : isOverK ? "step" : axisName;
    const [unit, seconds] = timeUnit(spec.lines.map((line) => line.table));
    const traces = spec.lines.map((line) => {
      const table = columns[line.table];
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

  // Takes the specs of all charts, by id, and the columns that they draw from.
  function take(newSpecs, newColumns) {
    specs = newSpecs;
    columns = newColumns;
  }

  function draw(id) {
    const chosen = document.querySelector("input[name=axis]:checked");
    const [traces, frame] = drawers[specs[id].kind](specs[id], chosen ? chosen.value : "step");
    Plotly.react(plotOf(id), traces, frame, calm);
  }

  // Calls `redraw` whenever all charts are to look otherwise, and shows the choice of the axis.
  function follow(redraw) {
    const form = document.getElementById("axis-form");
    form.hidden = false;
    form.addEventListener("change", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  // Keeps plots as wide as their places.
  function fitAll() {
    fit.disconnect();
    Object.keys(specs).forEach((id) => fit.observe(plotOf(id)));
  }

  return { take, draw, follow, fitAll, plotOf };
})();
