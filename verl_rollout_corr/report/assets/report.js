"use strict";
// Curves over steps become readable by the pointer. Without this script the same curves stand there as SVG.
(function () {
  const source = document.getElementById("curves");
  if (!source || typeof uPlot === "undefined") return;
  const curves = JSON.parse(source.textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const powers = (plot, values) => values.map((value) => (value === null ? "" : value.toExponential(0)));
  for (const curve of curves) {
    const figure = document.getElementById(curve.id);
    const picture = figure && figure.querySelector("svg");
    if (!picture || curve.x.length < 2) continue;
    const place = document.createElement("div");
    const width = () => Math.max(260, figure.clientWidth - 26);
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid") }, ticks: { stroke: colour("--grid") } };
    const options = {
      width: width(), height: 240,
      scales: { x: { time: false }, y: curve.log ? { distr: 3 } : { range: [0, 1] } },
      axes: [axis, Object.assign({ size: 64, values: curve.log ? powers : undefined }, axis)],
      series: [{ label: "step" }].concat(curve.y.map((line) => ({
        label: line.label, stroke: colour("--c" + line.colour), width: 1.8, points: { show: curve.x.length < 30 },
      }))),
    };
    const plot = new uPlot(options, [curve.x].concat(curve.y.map((line) => line.values)), place);
    picture.replaceWith(place);
    const legend = figure.querySelector(".legend");
    if (legend) legend.remove();
    addEventListener("resize", () => plot.setSize({ width: width(), height: 240 }));
  }
})();
