"use strict";
// Draws every chart from the JSON beside it, in the page's own colours, and lets the legends switch curves on and off.
(() => {
  const touch = matchMedia("(pointer: coarse)").matches;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axes = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));

  function paint(chart) {
    const ink = shade("--ink"), edge = shade("--edge");
    chart.layout.paper_bgcolor = chart.layout.plot_bgcolor = "rgba(0,0,0,0)";
    chart.layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: shade("--quiet") };
    chart.layout.hoverlabel = { align: "left", bgcolor: shade("--box"), bordercolor: edge, font: { color: ink } };
    chart.layout.hovermode = "closest";
    chart.layout.dragmode = touch ? false : "zoom"; // a finger scrolls the page
    for (const axis of axes(chart.layout)) Object.assign(chart.layout[axis], { gridcolor: edge, linecolor: edge });
    for (const trace of chart.data) {
      for (const part of ["line", "marker", "error_x"]) {
        if (!trace[part]) continue;
        trace[part].ink = trace[part].ink || trace[part].color === "ink";
        if (trace[part].ink) trace[part].color = ink;
      }
    }
    return chart;
  }

  const drawn = [];
  for (const place of document.querySelectorAll(".chart")) {
    const chart = paint(JSON.parse(place.nextElementSibling.textContent));
    Plotly.newPlot(place, chart.data, chart.layout, { responsive: true, displayModeBar: false });
    drawn.push({ place, chart });
  }

  dark.addEventListener("change", () => {
    for (const { place, chart } of drawn) {
      paint(chart);
      Plotly.redraw(place);
    }
  });

  for (const button of document.querySelectorAll("button.chip")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const { place, chart } of drawn) {
        if (!button.closest("figure").contains(place)) continue;
        const numbers = chart.data.flatMap((trace, i) => (trace.legendgroup === button.dataset.key ? [i] : []));
        if (numbers.length) Plotly.restyle(place, { visible: on ? true : "legendonly" }, numbers);
      }
    });
  }

  document.documentElement.dataset.charts = String(drawn.length); // every chart is there
})();
