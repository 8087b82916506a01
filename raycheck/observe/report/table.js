// The table of events: a page of rows at a time, of those that fit the filter.

function makeTable(data) {
  const PAGE = 100;
  const body = document.querySelector("#events-table tbody");
  if (!body) return;
  const text = byId("events-text"), kind = byId("events-kind");
  const clockText = (seconds) => new Date((data.begin + seconds) * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z";
  const kindText = (index) => data.kinds[index].replaceAll("_", " ");
  let found = [], first = 0;

  const wordsOf = ([, kindIndex, generation, step, what]) =>
    [kindText(kindIndex), generation < 0 ? "" : data.generations[generation][0], step < 0 ? "" : countText(step), what];

  function find() {
    const wanted = text.value.trim().toLowerCase(), only = Number(kind.value);
    found = data.events.filter((event) => (only < 0 || event[1] === only) &&
      (!wanted || wordsOf(event).join(" ").toLowerCase().includes(wanted)));
    first = 0;
    list();
  }

  function rowOf(event) {
    const row = document.createElement("tr");
    [afterText(event[0]), clockText(event[0]), ...wordsOf(event)].forEach((content, column) => {
      const cell = row.insertCell();
      cell.textContent = content;
      const name = { 0: "after", 4: "step" }[column];
      if (name) {
        cell.className = "num";
        cell.dataset.name = name;
      }
    });
    return row;
  }

  function list() {
    const last = Math.min(first + PAGE, found.length);
    body.replaceChildren(...found.slice(first, last).map(rowOf));
    byId("events-count").textContent = found.length ? `${countText(first + 1)} to ${countText(last)} of ${countText(found.length)}` : "no event fits";
    byId("events-back").disabled = first === 0;
    byId("events-on").disabled = last === found.length;
  }

  const turn = (rows) => { first += rows; list(); };
  data.kinds.forEach((_, index) => kind.add(new Option(kindText(index), index)));
  byId("events-back").addEventListener("click", () => turn(-PAGE));
  byId("events-on").addEventListener("click", () => turn(PAGE));
  text.addEventListener("input", find);
  kind.addEventListener("change", find);
  byId("events-tools").addEventListener("submit", (event) => event.preventDefault());
  byId("events-tools").hidden = false;
  find();
}

{
  const data = JSON.parse(byId("data").textContent);
  if (data !== null) {
    makeTimeline(data);
    makeTable(data);
    byId("no-script").hidden = true;
  }
}
