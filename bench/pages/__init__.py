"""Pages that are written from bench/results.

numbers        docs/numbers.md: questions and short answers
results_page   bench/results/README.md: every table
readme         the table in README.md
scale          the tables in docs/scale.md
agents         the tables in docs/agents.md and docs/cache.md
models         the table in docs/models.md
"""


def write() -> None:
    """All of them. A test compares them with the stored results."""
    from bench.pages import agents, models, numbers, readme, results_page, scale

    numbers.PATH.write_text(numbers.page())
    results_page.PATH.write_text(results_page.page())
    readme.update()
    scale.update()
    agents.update()
    models.update()
