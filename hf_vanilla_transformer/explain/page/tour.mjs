// Steps through the page from the top to the bottom, which can be skipped at any time.
import { el } from "./dom.mjs";

// What is shown, and whether it is a section, which is opened.
const STEPS = [["sentence"], ["overview"], ["switches"], ["figure"], ["encoder", true], ["beam", true]];

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
  const button = (name, to, key) =>
    el("button", { type: "button", id: `tour-${name}`, onclick: () => go(to) }, t(key));
  const next = button("next", isLast ? null : tour + 1, isLast ? "done" : "next");
  const onEscape = (event) => event.key === "Escape" && go(null);
  document.body.append(el("div",
    { id: "tour", role: "dialog", "aria-label": t("tour"), "data-step": tour, onkeydown: onEscape },
    el("p", {}, t("tourStep", { step: tour + 1, steps: STEPS.length })),
    el("p", { "aria-live": "polite" }, t(`tour_${tour + 1}`)),
    el("div", { class: "buttons" },
      tour > 0 ? button("back", tour - 1, "back") : null, isLast ? null : button("skip", null, "skip"), next)));
  next.focus({ preventScroll: true });
}
