"use strict";
(() => {
  const { charts, positions } = JSON.parse(document.getElementById("figures").textContent);
  const pressed = (group) => document.querySelector(`[data-${group}][aria-pressed=true]`)?.dataset[group];
  const chosen = { axis: pressed("axis"), scale: pressed("scale"), hidden: new Set() };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // On a touch screen a drag scrolls the page.
  const mouse = matchMedia("(pointer: fine)").matches;

  const known = (axis) => Object.values(positions).some((axes) => axes[axis]);
  const longest = Math.max(0, ...Object.values(positions).map((axes) => (axes.time || []).at(-1) || 0));
  const unit = longest < 120 ? ["s", 1] : longest < 7200 ? ["min", 60] : ["h", 3600];
  const axisTitles = { step: "step", epoch: "epoch", time: `training time (${unit[0]})` };

  function placed(trace) {
    // A run without times is absent from the time axis.
    const places = positions[trace.meta.where][chosen.axis] || [];
    const rows = trace.meta.rows ? trace.meta.rows.map((row) => places[row]) : places;
    const x = chosen.axis === "time" ? rows.map((seconds) => seconds / unit[1]) : rows;
    // Thin lines are hard to see on a dark page.
    const opacity = trace.opacity && (dark.matches ? 0.8 : trace.opacity);
    return { ...trace, x, opacity, visible: !chosen.hidden.has(trace.meta.run) };
  }

  function template() {
    const style = getComputedStyle(document.documentElement);
    const [paper, ink, faint, line] = ["paper", "ink", "faint", "line"].map((name) =>
      style.getPropertyValue(`--${name}`).trim(),
    );
    const axis = {
      gridcolor: line,
      zerolinecolor: line,
      linecolor: line,
      automargin: true,
      tickfont: { color: faint },
      title: { font: { color: faint, size: 12 }, standoff: 8 },
    };
    // The scale is steep near zero, so that a few confusions are visible beside many correct images.
    const shades = [[0, paper], [0.02, mixed(paper, 0.15)], [0.2, mixed(paper, 0.5)], [1, mixed(paper, 1)]];
    return {
      layout: {
        font: { family: "system-ui, sans-serif", size: 12, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 4, r: 8, t: 8, b: 4 },
        showlegend: false,
        dragmode: mouse ? "zoom" : false,
        hovermode: "closest",
        hoverlabel: { align: "left", namelength: -1 },
        xaxis: axis,
        yaxis: axis,
      },
      data: { heatmap: [{ colorscale: shades }] },
    };
  }

  /** A mix of the paper's colour and blue. */
  function mixed(paper, share) {
    const blue = [0, 114, 178];
    const from = [1, 3, 5].map((place) => parseInt(paper.slice(place, place + 2), 16));
    return `rgb(${from.map((value, i) => Math.round(value + share * (blue[i] - value))).join(",")})`;
  }

  /** A logarithmic axis; plotly's own minor tick labels are too small to read. */
  function logarithmic(chart) {
    const shown = chart.data.filter((trace) => !chosen.hidden.has(trace.meta.run));
    const values = shown.flatMap((trace) => trace.y).filter((value) => value > 0);
    const [most, least] = [Math.max, Math.min].map((of) => values.reduce((one, other) => of(one, other), values[0]));
    // A narrow range may lie between two of the ticks below. Plotly divides it evenly.
    if (most > 1e9 * least || most < 5 * least) return { type: "log", exponentformat: "e" };
    const digits = most > 1000 * least ? [1] : [1, 2, 5];
    const powers = Array.from({ length: 41 }, (_, place) => place - 20);
    return { type: "log", tickvals: powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`))) };
  }

  function layout(chart) {
    const { xaxis = {}, yaxis = {} } = chart.layout;
    const chosenAxis = { title: { text: axisTitles[chosen.axis] }, hoverformat: chosen.axis === "step" ? ",d" : ".4~g" };
    return {
      ...chart.layout,
      autosize: true, // Otherwise plotly keeps the size of the first drawing.
      template: template(),
      xaxis: { ...xaxis, ...(chart.curve ? chosenAxis : {}) },
      yaxis: { ...yaxis, ...(chart.logarithmic && chosen.scale === "log" ? logarithmic(chart) : {}) },
    };
  }

  function draw(chart) {
    const place = document.getElementById(chart.id);
    // In some browsers a chart in a closed section has no width yet.
    if (!place.clientWidth) return;
    const data = chart.curve ? chart.data.map(placed) : chart.data;
    Plotly.react(place, data, layout(chart), { responsive: true, displayModeBar: false });
  }

  const drawAll = () => charts.forEach(draw);
  for (const event of ["beforeprint", "afterprint"])
    addEventListener(event, () => {
      document.documentElement.classList.toggle("printed", event === "beforeprint");
      drawAll();
    });

  function press(button, group) {
    for (const each of document.querySelectorAll(group)) each.setAttribute("aria-pressed", String(each === button));
    drawAll();
  }

  for (const button of document.querySelectorAll("[data-axis]")) {
    button.disabled = !known(button.dataset.axis);
    button.addEventListener("click", () => {
      chosen.axis = button.dataset.axis;
      press(button, "[data-axis]");
    });
  }
  for (const button of document.querySelectorAll("[data-scale]"))
    button.addEventListener("click", () => {
      chosen.scale = button.dataset.scale;
      press(button, "[data-scale]");
    });
  for (const button of document.querySelectorAll("[data-run]"))
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const shown = chosen.hidden.delete(run) || !chosen.hidden.add(run);
      button.setAttribute("aria-pressed", String(shown));
      drawAll();
    });
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", drawAll);
  dark.addEventListener("change", drawAll);
  if (chosen.axis && !known(chosen.axis)) document.querySelector("[data-axis=step]").click();
  else drawAll();
})();
