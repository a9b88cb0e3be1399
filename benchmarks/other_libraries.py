"""Run the page *Coming from another library* with the installed libraries. The page checks that results agree.

Run it: `python -m benchmarks.other_libraries`.
"""

from pathlib import Path

from docs.blocks import installed, libraries, run

PAGE = Path(__file__).parent.parent / "docs" / "coming_from.md"


def main() -> None:
    """Run the page once for each library, and print which ones are installed."""
    here = installed(PAGE)
    for name in libraries(PAGE):
        if name in here:
            run(PAGE, [name])
        print(f"{name}: {'as here' if name in here else 'not installed'}")


if __name__ == "__main__":
    main()
