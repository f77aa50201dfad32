"""Calibration text of the kinds that agents write, for layer search where no traffic was recorded."""

from typing import Final

SAMPLES: Final = (
    """The harbour was quiet when the ferry came in. Two men stood on the quay with ropes in their hands, and
a dog ran up and down between them as if the boat were its own. Nobody had told the passengers that the last
bus had gone an hour ago. They stepped ashore one after another, looked at the empty road, and began to talk
about what to do next. An old woman pointed at the lights on the hill. There was an inn, she said, and it
had rooms, but the stairs were steep and the owner asked to be paid in advance. In the morning the same
ferry would take them back, or they could walk along the coast to the next village, which takes about three
hours if the weather is good. Most of them chose the inn.
""",
    '''def read_settings(path: str) -> dict[str, str]:
    """Reads lines of the form name = value; empty lines and comments are skipped."""
    settings = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, found, value = line.partition("=")
            if not found:
                raise ValueError(f"{path}, line {number}: expected name = value")
            settings[name.strip()] = value.strip()
    return settings


def write_settings(path: str, settings: dict[str, str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for name, value in sorted(settings.items()):
            file.write(f"{name} = {value}\\n")
''',
    """I will look up the order first and then check when it can be delivered.
{"name": "get_order", "arguments": {"order_id": "A-20417", "include_items": true}}
{"order_id": "A-20417", "status": "packed", "items": [{"sku": "lamp-3", "count": 2}, {"sku": "bulb-e27",
"count": 4}], "address": {"street": "12 Mill Lane", "city": "Leeds"}}
{"name": "get_delivery_dates", "arguments": {"order_id": "A-20417", "city": "Leeds"}}
{"dates": ["2024-05-03", "2024-05-04", "2024-05-06"]}
Your order A-20417 with two lamps and four bulbs is packed. It can be delivered to 12 Mill Lane in Leeds on
3, 4 or 6 May. Which day suits you best?
""",
)
