"use strict";
// Asks for the run's state while the page is seen, and shows what has changed. The server escapes every text in the
// HTML that it sends; the page's policy allows no script but the server's files.
(function () {
  const EVERY_MS = 3000;
  const REST = 50; // times the work of showing a state that pass before the next: the browser is to take little, too
  const byId = (id) => document.getElementById(id);
  let tag = "";
  let shown = { parts: {}, curves: { shape: [] }, choices: {} };
  let isLost = false;
  let clockAhead = 0; // ms by which the server's clock is ahead of this one
  let timer = null;
  const stale = new Set(); // charts that have new numbers and are not seen
  const seen = new Set();

  // ---- how long ago ----

  function ago(at) {
    const seconds = Math.max(0, Math.round((Date.now() + clockAhead) / 1000 - at));
    if (seconds < 120) { return seconds + " s ago"; }
    const minutes = Math.floor(seconds / 60);
    return minutes < 120 ? minutes + " min ago" : minutes < 2880 ? Math.floor(minutes / 60) + " h ago" : Math.floor(minutes / 1440) + " days ago";
  }

  function tick() {
    for (const element of document.querySelectorAll(".since")) { element.textContent = ago(Number(element.dataset.at)); }
    const said = [];
    if (shown.progress) { said.push(shown.progress); }
    if (shown.logged_at) { said.push("logged last " + ago(shown.logged_at)); }
    if (isLost) { said.push("the server is gone: this is what it said last. Start it again with: tba watch"); }
    put(byId("pulse"), said.join("; ") || "Nothing is logged yet.");
    byId("pulse").classList.toggle("lost", isLost);
  }

  function put(element, text) {
    if (element.textContent !== text) { element.textContent = text; }
  }

  // ---- parts ----

  function replace(place, html) {
    const open = [...place.querySelectorAll("details")].map((details) => details.open);
    place.innerHTML = html;
    place.querySelectorAll("details").forEach((details, number) => { details.open = open[number] || false; });
  }

  function showParts(parts) {
    for (const [name, html] of Object.entries(parts)) {
      if (html !== shown.parts[name]) { replace(byId("part-" + name), html); }
    }
  }

  function showStatus(status) {
    put(byId("status"), status);
    byId("status").className = "status " + status.replace(" ", "-");
  }

  // ---- curves ----

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const id = entry.target.id.slice("plot-".length);
      if (entry.isIntersecting) { seen.add(id); } else { seen.delete(id); }
    }
    drawSeen();
  }, { rootMargin: "200px" });

  function drawSeen() {
    for (const id of [...stale].filter((id) => seen.has(id))) {
      stale.delete(id);
      charts.draw(id);
    }
  }

  function drawAgain() {
    Object.keys(shown.curves.specs || {}).forEach((id) => stale.add(id));
    drawSeen();
  }

  function showCurves(curves) {
    if (JSON.stringify(curves) === JSON.stringify(shown.curves)) { return; }
    const isSameShape = JSON.stringify(curves.shape) === JSON.stringify(shown.curves.shape);
    charts.take(curves.specs, curves.columns);
    if (!isSameShape) {
      watcher.disconnect();
      seen.clear();
      stale.clear();
      byId("curves-place").innerHTML = curves.html;
      charts.fitAll();
      Object.keys(curves.specs).forEach((id) => watcher.observe(charts.plotOf(id)));
    }
    for (const [id, caption] of Object.entries(curves.captions)) { put(byId("caption-" + id), caption); }
    Object.keys(curves.specs).forEach((id) => stale.add(id));
    byId("axis-form").hidden = Object.keys(curves.specs).length === 0;
    drawSeen();
  }

  // ---- two versions ----

  function fill(select, values, wanted) {
    const kept = select.value;
    select.replaceChildren(...values.map((value) => {
      const option = document.createElement("option");
      option.value = String(value);
      const text = String(value);
      option.textContent = text.length > 60 ? text.slice(0, 60) + "…" : text;
      return option;
    }));
    select.value = values.map(String).includes(kept) ? kept : String(wanted);
  }

  function showChoices(choices) {
    if (JSON.stringify(choices) === JSON.stringify(shown.choices) || choices.prompts.length === 0) { return; }
    fill(byId("choice-prompt"), choices.prompts, choices.prompts[0]);
    fill(byId("choice-one"), choices.versions, choices.versions[0]);
    fill(byId("choice-other"), choices.versions, choices.versions[choices.versions.length - 1]);
    byId("choice").hidden = false;
    compare();
  }

  async function compare() {
    const asked = new URLSearchParams({
      prompt: byId("choice-prompt").value, one: byId("choice-one").value, other: byId("choice-other").value
    });
    try {
      const answer = await fetch("/difference?" + asked);
      if (answer.ok) { replace(byId("difference"), await answer.text()); }
    } catch (error) {
      lose();
    }
  }

  // ---- asking ----

  function lose() {
    isLost = true;
    tick();
  }

  function show(state) {
    showStatus(state.status);
    showParts(state.parts);
    showCurves(state.curves);
    showChoices(state.choices);
    shown = state;
  }

  async function ask() {
    let took = 0;
    try {
      const answer = await fetch("/state", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const state = await answer.json();
        const started = performance.now();
        show(state);
        took = performance.now() - started;
        tag = answer.headers.get("ETag");
      } else if (answer.status !== 304) {
        throw new Error("status " + answer.status);
      }
      clockAhead = Date.parse(answer.headers.get("Date")) - Date.now() || 0;
      isLost = false;
      tick();
    } catch (error) {
      lose();
      console.warn("tba watch: " + error);
    }
    later(Math.max(EVERY_MS, REST * took));
  }

  function later(ms) {
    clearTimeout(timer);
    timer = document.hidden ? null : setTimeout(ask, ms);
  }

  document.addEventListener("visibilitychange", () => later(0));
  byId("choice").addEventListener("change", compare);
  byId("choice").addEventListener("submit", (event) => event.preventDefault());
  charts.follow(drawAgain);
  byId("axis-form").hidden = true;
  setInterval(tick, 1000);
  ask();
})();
