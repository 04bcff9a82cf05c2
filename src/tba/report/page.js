"use strict";
// Text from the run enters the page through textContent only.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

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

  function startCharts() {
    if (Object.keys(data.charts).length === 0) { return; }
    const drawAll = () => Object.keys(data.charts).forEach(charts.draw);
    charts.take(data.charts, data.columns);
    charts.follow(drawAll);
    drawAll();
    charts.fitAll();
  }

  startCharts();
  startBrowser();
})();
