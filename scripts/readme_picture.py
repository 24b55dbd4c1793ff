"""Makes README's moving picture: the page of `vanilla-transformer explain` in Chromium, as a GIF.

    python -m scripts.readme_picture --page outputs/quickstart/explain.html --output docs/images/explain.gif

It needs Chromium with its driver, selenium and Pillow. It shows what each target token attends to, then the translation
without positions, then the beam search step by step.
"""

import argparse
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

WIDTH, HEIGHT = 1000, 660  # pixels
MOST_BYTES = 1_000_000
COLOURS = 48
LONG, SHORT = 1_800, 450  # milliseconds that a picture is shown
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip

Frame = tuple[Image.Image, int]  # a picture, and for how many milliseconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, required=True, help="the page, of `explain` or of the quickstart")
    parser.add_argument("--sentence", default="We have to pay twenty-three euros on Monday.", help="what is translated")
    parser.add_argument("--output", required=True, help="GIF file")
    options = parser.parse_args(arguments)
    if not options.page.is_file() or shutil.which("chromedriver") is None:
        lacks = "chromedriver" if options.page.is_file() else f"{options.page}; run `make quickstart` before"
        raise SystemExit(f"readme_picture: there is no {lacks}")
    driver = open_page(options.page)
    try:
        save(list(frames(driver, options.sentence)), options.output)
    finally:
        driver.quit()


def open_page(page: Path) -> Any:
    """Opens the page in light colours, whatever the machine prefers."""
    chrome = webdriver.ChromeOptions()
    for flag in FLAGS:
        chrome.add_argument(flag)
    driver = webdriver.Chrome(options=chrome, service=webdriver.ChromeService(shutil.which("chromedriver")))
    metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    light = [{"name": "prefers-color-scheme", "value": "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": light})
    driver.get(page.resolve().as_uri())
    return driver


def frames(driver: Any, sentence: str) -> Iterator[Frame]:
    """Goes through the page."""
    run = driver.execute_script
    run("document.getElementById('source').value = arguments[0]; app.translate(arguments[0])", sentence)
    yield picture(driver), LONG
    for place in range(1, run("return app.target.length") - 1):
        run("app.set({place: arguments[0]})", place)
        yield picture(driver), SHORT
    run("app.set({place: 0}); document.getElementById('switch-positions').click()")
    yield picture(driver), LONG
    run("document.getElementById('switch-positions').click()")
    run("document.getElementById('beam').open = true; app.set({step: 1})")
    run("document.getElementById('beam').scrollIntoView()")
    for step in range(1, run("return app.run.search.steps.length") + 1):
        run("app.set({step: arguments[0]}); document.querySelector('#beam .scroll').scrollLeft = 1e4", step)
        yield picture(driver), SHORT
    yield picture(driver), 2 * LONG


def picture(driver: Any) -> Image.Image:
    """What the window shows."""
    shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return shot.quantize(COLOURS, dither=Image.Dither.NONE)


def save(shown: list[Frame], output: str) -> None:
    """Saves the pictures as one that moves."""
    first, *others = [image for image, _ in shown]
    durations = [milliseconds for _, milliseconds in shown]
    first.save(output, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)
    if (size := Path(output).stat().st_size) > MOST_BYTES:
        raise SystemExit(f"readme_picture: {output} has {size:,} bytes, more than {MOST_BYTES:,}; shorten --sentence")


if __name__ == "__main__":
    main()
