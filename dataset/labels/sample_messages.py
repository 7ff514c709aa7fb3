"""The embedded sample of labelled texts: what customers of a shop want, in a sentence or two.

A message is one of its intent's requests with words for its blanks, maybe with a remark that says nothing of the
intent (some quote another request), a greeting and a slip of the keyboard. Some requests belong to two intents.

Only uniform random numbers are drawn, as in :mod:`dataset.store.sample`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

_REQUESTS = {
    "track_order": ("where is my {item}", "when will the {item} arrive", "{ask} has my {parcel} been shipped yet",
                    "the tracking page shows nothing for my {parcel}", "{late} and no sign of my {item}"),
    "cancel_order": ("{ask} stop the order of the {item}", "i {changed} and don't want the {item} any more",
                     "please cancel what i bought {when}", "i ordered the {item} twice, remove one",
                     "{return_or_cancel}"),
    "change_address": ("send the {item} to my {place} instead", "i moved, {ask} update where you deliver",
                       "the street on my order is wrong", "{ask} ship the {parcel} to another address"),
    "return_item": ("how do i send the {item} back", "the {item} does not suit me, i'd like to return it",
                    "{ask} print a label to send something back", "do i have to pay for a return",
                    "{return_or_cancel}"),
    "refund_status": ("when do i get my money back for the {item}", "i returned the {item} {when} and got no refund",
                      "{ask} check on my refund", "{late} and the money is still not on my account"),
    "damaged_item": ("the {item} came {broken}", "my {parcel} was {broken} when it arrived", "{replace}",
                     "the {item} stopped working after a day", "there is a crack in the {item}"),
    "wrong_item": ("i got a {item} but ordered a {item}", "this is not the {item} that i chose", "{replace}",
                   "the {item} has the wrong size", "half of my order is missing, only the {item} was in the {parcel}"),
    "payment_failed": ("my {card} was declined", "i can't pay for the {item}", "the checkout shows an error at payment",
                       "i was charged twice for the {item}", "{ask} try my {card} again"),
    "invoice": ("{ask} send me the bill for the {item}", "i need an invoice with my company's name",
                "where do i download the receipt", "my accountant asks for the vat of the {item}"),
    "voucher": ("my code is not accepted", "{ask} add a voucher to what i bought {when}",
                "is there a discount on the {item}", "how long is a gift card valid",
                "the price of the {item} did not go down with my coupon"),
    "account_access": ("i forgot my password", "i can't log in {when}", "{ask} unlock my account",
                       "the mail with the link to reset never arrived", "someone else uses my login"),
    "availability": ("is the {item} in stock", "when do you get the {item} again",
                     "do you have the {item} in another colour", "{ask} tell me when i can buy the {item}",
                     "do you sell a {item} for children"),
}  # fmt: skip
_WORDS = {
    "ask": ("can you", "could you please", "please", "would you", "i want you to", "pls"),
    "item": ("kettle", "blue jacket", "lamp", "phone case", "desk chair", "toaster", "rain coat", "tent", "bike lock",
             "pair of boots", "headset", "coffee grinder", "backpack", "clock"),
    "parcel": ("parcel", "package", "order", "box"),
    "when": ("yesterday", "last week", "on monday", "two days ago", "this morning", "since friday"),
    "late": ("ten days now", "it has been two weeks", "still waiting", "it's been ages"),
    "place": ("office", "new flat", "neighbour", "parents' house"),
    "card": ("card", "credit card", "debit card", "bank card"),
    "broken": ("broken", "in pieces", "scratched", "with a dent", "torn"),
    "changed": ("changed my mind", "found it cheaper", "made a mistake"),
    "return_or_cancel": ("i don't need the {item} after all", "the {item} is not for me",
                         "take the {item} back please"),
    "replace": ("{ask} replace the {item}", "i want another {item} for this one",
                "i'm not happy with the {item} you sent"),
    "remark": ("i paid with my {card}", "i bought it {when}", "the {item} was a gift", "your site is slow {when}",
               "i moved to a new flat", "i have used a voucher", "my password is fine", "i already returned a {item}",
               "last month i asked: {request}", "i don't mean: {request}", "my friend wrote to you: {request}"),
    "greeting": ("hi", "hello", "good morning", "hey there", "dear team"),
    "close": ("thanks", "thank you", "regards", "asap", "??"),
}  # fmt: skip
_WORDS["request"] = tuple(request for requests in _REQUESTS.values() for request in requests)
_BLANK = re.compile(r"\{(\w+)\}")


def message_records(records: int, seed: int) -> Iterator[tuple[str, str]]:
    """Ids like ``track_order_00034`` and messages, in lower case; the same seed gives the same records."""
    random = np.random.Generator(np.random.PCG64([seed, 0, 2]))
    intents = tuple(_REQUESTS)
    for number in range(records):
        intent = intents[number % len(intents)]
        yield f"{intent}_{number:05d}", _message(intent, random)


def _message(intent: str, random: np.random.Generator) -> str:
    parts = [_filled(_one(_REQUESTS[intent], random), random)]
    if random.random() < 0.6:
        parts.insert(int(2 * random.random()), _filled("{remark}", random))
    text = ". ".join(parts)
    if random.random() < 0.3:
        text = _filled("{greeting}, ", random) + text
    if random.random() < 0.3:
        text += _filled(" {close}", random)
    return _mistyped(text, random) if random.random() < 0.3 else text


def _filled(text: str, random: np.random.Generator) -> str:
    while blank := _BLANK.search(text):
        text = text[: blank.start()] + _one(_WORDS[blank[1]], random) + text[blank.end() :]
    return text


def _mistyped(text: str, random: np.random.Generator) -> str:
    """The text without one of its letters."""
    at = int(len(text) * random.random())
    return text[:at] + text[at + 1 :]


def _one(choices: Sequence[str], random: np.random.Generator) -> str:
    return choices[int(random.random() * len(choices))]
