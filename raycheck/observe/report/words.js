"use strict";
// Times and counts in words, for the timeline and the table. Texts of the run are set as text, never as markup.

const numbers = new Intl.NumberFormat("en");
const countText = (count) => numbers.format(count);
const byId = (id) => document.getElementById(id);

// Seconds as a length of time: "2 h 5 min 3 s".
function afterText(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"]].map(([size, unit]) => {
    const count = Math.floor(seconds / size);
    seconds -= count * size;
    return count ? `${count} ${unit}` : "";
  });
  const isLong = parts.some(Boolean);
  return [...parts.filter(Boolean), `${seconds.toFixed(isLong ? 0 : 2)} s`].slice(0, 3).join(" ");
}

// Seconds as a place on an axis whose ticks are a step apart.
function tickText(seconds, step) {
  if (seconds === 0) return "0";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([s]) => step >= s) || [1, "s"];
  return `${+(seconds / size).toFixed(3)} ${unit}`;
}
