"""A tenant's predictor learns which call follows which and where arguments come from, in bounded memory."""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.server.tool_prediction import PredictionRequest, ToolPrediction, ToolPredictions
from paceline.server.tool_prediction.conversation import (
    MAX_LEAVES,
    Conversation,
    canonical,
    dates,
    form_of,
    leaves,
    text_values,
)
from paceline.server.tool_prediction.predictor import (
    MAX_CANDIDATES,
    MAX_KNOWN_TOOLS,
    MAX_SOURCES,
    MAX_VALUES,
    Forecast,
    PredictedCall,
    ToolCallPredictor,
    typed,
)
from support.agent_runs import FUNCTIONS, SAFE, Call, Message, Shop, function, said

TOOLS = {name: FUNCTIONS[name] for name in SAFE}
P = 0.5


def learned(runs: int, seed: int = 0, shuffled: bool = False) -> ToolCallPredictor:
    predictor, shop = ToolCallPredictor(), Shop(random.Random(seed), shuffled)
    for _ in range(runs):
        for messages, calls in shop.run():
            predictor.learn(predictor.predict(Conversation(messages), TOOLS), calls)
    return predictor


def texts(calls: Sequence[PredictedCall]) -> list[tuple[str, str]]:
    return [(call.name, canonical(call.arguments)) for call in calls]


def replayed(predictor: ToolCallPredictor, shop: Shop, runs: int) -> tuple[int, int, int, int]:
    """Calls written, predicted before, predicted with the name written, and wrong predictions."""
    written = early = named = wrong = 0
    for _ in range(runs):
        for messages, calls in shop.run():
            forecast = predictor.predict(Conversation(messages), TOOLS)
            made = [(name, canonical(arguments)) for name, arguments in calls]
            first = texts(forecast.calls(P, 4))
            written += len(made)
            early += len(set(made) & set(first))
            wrong += len(set(first) - set(made))
            for name, text in made:
                named += (name, text) in texts(forecast.given_name(name, P, 4))
            predictor.learn(forecast, calls)
    return written, early, named, wrong


def test_most_calls_of_a_regular_agent_are_predicted_and_few_wrongly() -> None:
    written, early, named, wrong = replayed(learned(12), Shop(random.Random(1)), 20)
    assert early > 0.8 * written
    assert named > 0.9 * written
    assert wrong < 0.2 * early


def test_nothing_is_predicted_where_arguments_come_from_nowhere() -> None:
    shop = Shop(random.Random(1), shuffled=True)
    written, early, named, wrong = replayed(learned(12, shuffled=True), shop, 20)
    lookups = 20  # an email is still in the user's text
    assert early <= lookups
    assert named <= lookups + 4
    assert wrong < 0.1 * written


def test_without_history_nothing_is_predicted() -> None:
    messages, _ = next(Shop(random.Random(0)).run())
    forecast = ToolCallPredictor().predict(Conversation(messages), TOOLS)
    assert forecast.calls(0.0, 9) == ()
    assert forecast.given_name("find_customer", 0.0, 9) == ()


def test_equal_histories_give_equal_predictions() -> None:
    messages = list(Shop(random.Random(5)).run())[2][0]
    one, other = (learned(6).predict(Conversation(messages), TOOLS).calls(0.0, 9) for _ in range(2))
    assert one == other != ()


def test_only_given_tools_are_predicted() -> None:
    predictor = learned(12)
    for messages, _ in Shop(random.Random(2)).run():
        forecast = predictor.predict(Conversation(messages), {"get_order": TOOLS["get_order"]})
        assert {call.name for call in forecast.calls(0.0, 9)} <= {"get_order"}
        assert forecast.given_name("find_customer", 0.0, 9) == ()


def test_probabilities_are_those_of_a_coin_where_a_coin_decides() -> None:
    predictor, rng = ToolCallPredictor(), random.Random(3)
    tools = {"look": function("look"), "listen": function("listen")}
    messages = [{"role": "user", "content": "What is there?"}]
    said_so = 0.0
    for i in range(400):
        forecast = predictor.predict(Conversation(messages), tools)
        if i >= 200:
            said_so += sum(call.probability for call in forecast.calls(0.0, 9) if call.name == "look")
        predictor.learn(forecast, [("look" if rng.random() < 0.7 else "listen", {})])
    assert 0.62 < said_so / 200 < 0.78


def one_call(history: list[tuple[list[Message], list[Call]]], tool: dict[str, Any]) -> Forecast:
    predictor = ToolCallPredictor()
    tools = {tool["name"]: tool}
    for messages, calls in history * 4:
        predictor.learn(predictor.predict(Conversation(messages), tools), calls)
    return predictor.predict(Conversation(history[-1][0]), tools)


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def test_constants_and_omitted_arguments_are_learned() -> None:
    tool = function("search", query="string", unit="string", page="integer")
    tool["parameters"]["required"] = ["query", "unit"]
    history = [(user(f"Find '{word}' please"), [("search", {"query": word, "unit": "km"})]) for word in "abc"]
    best = one_call(history, tool).calls(P, 1)
    assert texts(best) == [("search", '{"query":"c","unit":"km"}')]


def test_numbers_and_texts_are_taken_as_the_schema_wants_them() -> None:
    tool = function("convert", litres="number", code="string")
    result = said(("list", {}), {"code": 4711}, "call_0")
    history = [
        ([*user(f"{n} litres?"), *result], [("convert", {"litres": n, "code": "4711"})]) for n in (2, 30)
    ]
    assert texts(one_call(history, tool).calls(P, 1)) == [("convert", '{"code":"4711","litres":30}')]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("12", "integer", 12),
        ("1.5", "number", 1.5),
        ("1.5", "integer", None),
        ("twelve", "integer", None),
        ("nan", "number", None),
        (12, "string", "12"),
        (True, "integer", None),
        (True, "boolean", True),
        ("x", "array", None),
        (None, "string", None),
        ("x", ["string", "null"], "x"),
    ],
)
def test_a_value_fits_a_schema_or_is_none(value: Any, kind: Any, expected: Any) -> None:
    assert typed(value, {"type": kind}) == expected


def test_places_are_named_without_ids_and_indices() -> None:
    result = {"orders": ["#W1", "#W2"], "cards": {"visa_17": {"owner": "Ada"}}}
    assert [(leaf.path, leaf.value) for leaf in leaves(result)] == [
        ("orders[*]", "#W1"),
        ("orders[*]", "#W2"),
        ("cards.~", "visa_17"),
        ("cards.*.owner", "Ada"),
    ]
    assert form_of("#W9502127") == form_of("#X1234567") != form_of("#W12")
    found = list(text_values("I'm Ada Lovelace (ada.l@example.com), order #W9502127, file 'my notes.txt'."))
    assert ("email", "ada.l@example.com") in found
    assert ("Names", "Ada Lovelace") in found
    assert ("quoted", "my notes.txt") in found
    assert (form_of("#W9502127"), "#W9502127") in found


def test_values_have_the_words_beside_them() -> None:
    items = [{"name": "Desk Lamp", "id": "p1"}, {"name": "Kettle", "id": "p2"}]
    beside = {leaf.value: leaf.near for leaf in leaves({"items": items}) if leaf.path == "items[*].id"}
    assert beside == {"p1": {"desk", "lamp"}, "p2": {"kettle"}}
    table = {"Desk Lamp": "17", "Kettle": "18", "Stool": "19", "Mirror": "20"}
    near_ids = [("*", "17", frozenset({"desk", "lamp"})), ("*", "18", frozenset({"kettle"}))]
    assert [(leaf.path, leaf.value, leaf.near) for leaf in leaves(table)][:2] == near_ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on November 15, 2026.", ["2026-11-15"]),
        ("the 3rd of May 2026", ["2026-05-03"]),
        ("from May 20 to May 27th", ["2024-05-20", "2024-05-27"]),
        ("12 apples, may be", []),
    ],
)
def test_dates_in_words_are_read_as_tools_want_them(text: str, expected: list[str]) -> None:
    assert [value for _, value in dates(text, "2024")] == expected


def test_the_year_of_a_date_is_the_systems() -> None:
    chat = Conversation([{"role": "system", "content": "It is 2024-05-15 now."}, *user("On May 20, please.")])
    assert list(chat.sources["u:date"].values.values()) == ["2024-05-20"]


def test_names_and_large_numbers_are_split_and_joined() -> None:
    found = list(text_values("I am Yusuf Rossi and have 20,000 points"))
    assert ("Names first", "Yusuf") in found
    assert ("Names last", "Rossi") in found
    assert ("9,9", "20000") in found


def test_a_code_is_known_by_its_length_whatever_the_order_of_its_letters_and_digits() -> None:
    for code in ("3RK2T9", "HXDUBJ", "1N99U6"):
        assert ("code 6", code) in list(text_values(f"My reservation is {code}, please."))
    assert not any(form.startswith("code") for form, _ in text_values("My Bag is AB and ada_71."))


def test_the_name_in_an_address_may_be_an_id() -> None:
    assert ("email name", "ada_71") in list(text_values("It is ada_71@example.com."))


def flights(rng: random.Random) -> list[dict[str, str]]:
    towns = rng.sample(["OSL", "LIM", "BRN", "CAI", "UIO", "TRN", "PER", "DKR", "HAN", "LBA"], 6)
    ends = zip(towns[::2], towns[1::2], strict=True)
    return [{"origin": a, "destination": b, "date": f"2026-05-{rng.randrange(10, 30)}"} for a, b in ends]


def test_arguments_are_taken_from_one_object_together() -> None:
    """One of three flights is looked up, and nothing says which: a call mixed of two of them never comes."""
    tool = function("search", origin="string", destination="string", date="string")
    rng, predictor, whole, mixed = random.Random(2), ToolCallPredictor(), 0, 0
    for number in range(60):
        booked = flights(rng)
        call = {"id": "c", "type": "function", "function": {"name": "get_booking", "arguments": "{}"}}
        messages: list[Message] = [
            *user("Is there an earlier flight?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": json.dumps({"flights": booked})},
        ]
        forecast = predictor.predict(Conversation(messages), {"search": tool})
        if number >= 30:
            found = [call.arguments for call in forecast.given_name("search", 0.1, 4)]
            whole += sum(given in booked for given in found)
            mixed += sum(given not in booked for given in found)
        predictor.learn(forecast, [("search", rng.choice(booked))])
    assert whole >= 60
    assert mixed <= 10


def test_the_thing_that_the_user_names_is_the_one_looked_up() -> None:
    things = ["lamp", "kettle", "stool", "mirror", "carpet", "teapot"]
    tool = function("get_product", product_id="string")
    rng, history = random.Random(1), list[tuple[list[Message], list[Call]]]()
    for _ in range(30):
        here = rng.sample(things, 4)
        listed = [{"name": name, "product_id": str(rng.randrange(10**6, 10**7))} for name in here]
        wanted = rng.choice(listed)
        call = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": "{}"}}
        messages: list[Message] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": json.dumps({"items": listed})},
            *user(f"Are there other colours of the {wanted['name']}?"),
        ]
        history.append((messages, [("get_product", {"product_id": wanted["product_id"]})]))
    predictor, right = ToolCallPredictor(), 0
    for number, (messages, calls) in enumerate(history):
        forecast = predictor.predict(Conversation(messages), {"get_product": tool})
        right += number >= 15 and texts(forecast.calls(P, 1)) == [(n, canonical(a)) for n, a in calls]
        predictor.learn(forecast, calls)
    assert right >= 13  # of 15; by chance 4


def test_arguments_of_a_new_tool_are_found_by_their_names() -> None:
    known = learned(12)
    call = {"id": "c", "type": "function", "function": {"name": "get_order", "arguments": "{}"}}
    messages: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": json.dumps({"parcel_id": "P-77"})},
    ]
    tools = {"track": function("track", parcel_id="string"), "clock": function("clock")}
    forecast = known.predict(Conversation(messages), tools)
    assert forecast.calls(0.0, 9) == ()  # who says that it is called?
    assert texts(forecast.given_name("track", 0.0, 1)) == [("track", '{"parcel_id":"P-77"}')]
    assert texts(forecast.given_name("clock", P, 1)) == [("clock", "{}")]


def test_numbers_are_written_as_the_tool_had_them() -> None:
    tool = function("convert", liter="number")
    history = [(user(f"How much are {n} liters?"), [("convert", {"liter": float(n)})]) for n in (20, 35, 50)]
    assert texts(one_call(history, tool).calls(P, 1)) == [("convert", '{"liter":50.0}')]


def test_events_name_calls_and_their_errors() -> None:
    messages = [
        *user("x"),
        *said(("get_order", {}), "Error: not found", "c"),
        {"role": "assistant", "content": "No."},
    ]
    chat = Conversation([*messages, *user("y")])
    assert chat.events == ["U", "get_order!", "A", "U"]
    assert chat.since_user == []


def hostile_messages() -> list[Message]:
    nested: Any = "deep"
    for _ in range(50):
        nested = [nested]
    wide = {f"key {i}": i for i in range(5000)}
    calls: list[Any] = [None, 7, {}, {"function": 3}, {"id": 1, "function": {"name": 2, "arguments": "["}}]
    return [
        {"role": "tool", "tool_call_id": "nobody", "content": "x"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": [{"type": "text", "text": "\ud800"}]},
        *said(("get_order", {"order_id": nested}), wide, "c1"),
        *said(("get_order", {"order_id": "y" * 9999}), "[" * 3000, "c2"),
        *said(("get_order", {"order_id": "\ud800"}), {"a": "\ud800"}, "c3"),
        *user("word " * 20000 + "\ud800 '" * 99),
        {"role": "strange"},
    ]


def test_any_messages_and_tools_can_be_read() -> None:
    predictor = learned(3)
    broken: dict[str, Any] = {
        **TOOLS,
        "no_schema": {"name": "no_schema"},
        "strange": {
            "name": "strange",
            "parameters": {"properties": {"x": 3, "y": {"type": 4}}, "required": [[]]},
        },
    }
    messages = hostile_messages()
    for calls in ([("get_order", {"order_id": "y" * 9999})], [("strange", {"x": [1], "y": "\ud800"})], []):
        forecast = predictor.predict(Conversation(messages), broken)
        json.dumps(texts(forecast.calls(0.0, 9)))
        predictor.learn(forecast, calls)
    assert len(list(leaves({str(i): i for i in range(5000)}))) <= 2 * MAX_LEAVES


def test_the_memory_of_a_tenant_is_bounded() -> None:
    predictor, rng = ToolCallPredictor(), random.Random(0)
    for i in range(400):
        name = f"get_{i % 300}"
        tools = {name: function(name, order_id="string")}
        value = f"v{rng.random()}"
        messages = [
            *user(f"{value} {i}"),
            *said((f"tool_{i}", {f"arg{i}": value}), {f"path{'x' * i}": value}, "c"),
        ]
        forecast = predictor.predict(Conversation(messages), tools)
        assert len(forecast.candidates) <= MAX_CANDIDATES
        predictor.learn(forecast, [(name, {"order_id": value})])
    slots = [slot for tool in predictor._tools.values() for slot in tool.values()]
    assert len(predictor._tools) <= MAX_KNOWN_TOOLS
    assert all(len(slot.sources) <= MAX_SOURCES and len(slot.values) <= MAX_VALUES for slot in slots)


async def ask(
    service: ToolPredictions, tenant: str | None, messages: list[Message], **more: Any
) -> ToolPrediction:
    tools = [{"type": "function", "function": FUNCTIONS[name]} for name in FUNCTIONS]
    request = PredictionRequest.of(messages, tools, more.get("tool_choice"), more.get("safe_tools", SAFE), P)
    return await service.predict(request, tenant, more.get("remember", True))


async def taught(service: ToolPredictions, tenant: str | None, runs: int = 10, **more: Any) -> None:
    shop = Shop(random.Random(0))
    for _ in range(runs):
        for messages, calls in shop.run():
            prediction = await ask(service, tenant, messages, **more)
            prediction.settle([(name, json.dumps(arguments)) for name, arguments in calls])


async def offered(service: ToolPredictions, tenant: str | None, **more: Any) -> int:
    """Predicted calls of a run."""
    return sum([len((await ask(service, tenant, m, **more)).calls) for m, _ in Shop(random.Random(9)).run()])


def test_tenants_never_see_predictions_from_one_another() -> None:
    async def main() -> None:
        service = ToolPredictions()
        await taught(service, "anna")
        assert await offered(service, "anna") > 0
        assert await offered(service, "bert") == 0
        assert await offered(service, None) == 0

    asyncio.run(main())


def test_a_request_that_is_not_remembered_teaches_nothing_and_may_use_what_is_known() -> None:
    async def main() -> None:
        service = ToolPredictions()
        await taught(service, "anna", remember=False)
        assert await offered(service, "anna") == 0
        await taught(service, "anna")
        assert await offered(service, "anna", remember=False) > 0

    asyncio.run(main())


def test_only_tools_marked_safe_are_predicted() -> None:
    async def main() -> None:
        service = ToolPredictions()
        await taught(service, "anna")
        assert await offered(service, "anna", safe_tools=()) == 0
        assert await offered(service, "anna", tool_choice="none") == 0
        for messages, _ in Shop(random.Random(9)).run():
            calls = (await ask(service, "anna", messages, safe_tools=("get_order",))).calls
            assert {call.name for call in calls} <= {"get_order"}

    asyncio.run(main())


def test_a_tool_that_must_be_called_has_its_name_known() -> None:
    async def main() -> None:
        service = ToolPredictions()
        await taught(service, "anna", runs=3)
        for messages, calls in Shop(random.Random(9)).run():
            for name, arguments in calls:
                choice = {"type": "function", "function": {"name": name}}
                found = (await ask(service, "anna", messages, tool_choice=choice, remember=False)).calls
                assert texts(found)[:1] == [(name, canonical(arguments))]
                assert {call.name for call in found} == {name}

    asyncio.run(main())


def test_the_oldest_tenants_are_forgotten() -> None:
    async def main() -> None:
        service = ToolPredictions(max_tenants=2)
        await taught(service, "anna")
        await offered(service, "bert")
        assert await offered(service, "anna") > 0
        await offered(service, "cleo")
        await offered(service, "dora")
        assert await offered(service, "anna") == 0

    asyncio.run(main())


def test_outcomes_are_counted_once_for_each_call() -> None:
    async def main() -> None:
        service = ToolPredictions()
        await taught(service, "anna")
        messages, ((name, arguments),) = next(Shop(random.Random(9)).run())
        right = await ask(service, "anna", messages, remember=False)
        assert texts(right.calls) == [(name, canonical(arguments))]
        assert right.given_name(name) == ()  # offered before
        assert right.settle([(name, json.dumps(arguments))]) == {"right": 1, "wrong": 0, "missed": 0}
        assert right.settle([]) == {"right": 0, "wrong": 1, "missed": 0}
        assert right.settle([("get_order", "{}")]) == {"right": 0, "wrong": 1, "missed": 1}
        assert right.settle([("cancel_order", "{")]) == {"right": 0, "wrong": 1, "missed": 0}
        assert right.settle(None) == {"unknown": 1}

    asyncio.run(main())


def test_a_failing_predictor_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        service = ToolPredictions()
        monkeypatch.setattr(ToolCallPredictor, "predict", lambda *_: 1 / 0)
        prediction = await ask(service, "anna", user("x"))
        assert prediction.calls == ()
        assert prediction.settle([]) == {"right": 0, "wrong": 0, "missed": 0}

    asyncio.run(main())


def test_a_predictor_takes_about_a_megabyte() -> None:
    predictor = learned(1)
    tables = (predictor._names, predictor._values, predictor._calls)
    assert sum(sys.getsizeof(t._weights) + sys.getsizeof(t._squares) for t in tables) < 1 << 20
