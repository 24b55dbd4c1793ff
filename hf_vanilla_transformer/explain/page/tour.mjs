// Five steps through the page, which can be skipped at any time.
import { el } from "./dom.mjs";

const STEPS = [["sentence"], ["overview"], ["encoder", true], ["switches"], ["beam", true]];  // what is shown; a section?

/** Draws the step that the state says, or nothing. */
export function drawTour(app, openSection) {
  const { t, state: { tour } } = app, shown = document.getElementById("tour");
  if (shown?.dataset.step === String(tour)) return;
  shown?.remove();
  document.querySelector(".toured")?.classList.remove("toured");
  if (tour === null) return;
  const [id, isSection] = STEPS[tour], go = (to) => app.set({ tour: to });
  if (isSection) openSection(app, id);
  const target = document.getElementById(id), isLast = tour + 1 === STEPS.length;
  target.classList.add("toured");
  target.scrollIntoView({ block: "start" });
  const next = el("button", { type: "button", id: "tour-next", onclick: () => go(isLast ? null : tour + 1) }, t(isLast ? "done" : "next"));
  document.body.append(el("div", {
    id: "tour", role: "dialog", "aria-label": t("tour"), "data-step": tour, onkeydown: (event) => event.key === "Escape" && go(null),
  }, el("p", {}, t("tourStep", { step: tour + 1, steps: STEPS.length })), el("p", { "aria-live": "polite" }, t(`tour_${tour + 1}`)),
  el("div", { class: "buttons" },
    tour > 0 ? el("button", { type: "button", id: "tour-back", onclick: () => go(tour - 1) }, t("back")) : null,
    isLast ? null : el("button", { type: "button", id: "tour-skip", onclick: () => go(null) }, t("skip")), next)));
  next.focus({ preventScroll: true });
}
