"""Names to ask for, drawn without repetition."""

from __future__ import annotations

from itertools import product
from random import Random
from uuid import UUID

ADJECTIVES = (
    *("amber", "ancient", "brave", "bright", "calm", "clever", "cold", "curious", "dusty", "eager", "early", "fancy"),
    *("fierce", "gentle", "golden", "green", "happy", "hidden", "hollow", "humble", "icy", "jolly", "kind", "late"),
    *("lazy", "little", "lonely", "loud", "lucky", "mild", "modern", "muddy", "noble", "odd", "pale", "patient"),
    *("plain", "polite", "proud", "quick", "quiet", "rapid", "rare", "rough", "royal", "shy", "silent", "silver"),
)
NOUNS = (
    *("anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "bottle", "bridge", "candle", "canyon"),
    *("castle", "cedar", "comet", "copper", "coral", "desert", "dragon", "engine", "falcon", "feather", "forest"),
    *("garden", "glacier", "hammer", "harbor", "island", "jacket", "kettle", "ladder", "lantern", "lemon", "magnet"),
    *("marble", "meadow", "mirror", "needle", "orchid", "paddle", "pepper", "pillow", "planet", "pocket", "rabbit"),
    *("ribbon", "river", "saddle", "shadow", "shield", "spider", "spoon", "summit", "temple", "thunder", "ticket"),
    *("tiger", "tunnel", "turtle", "valley", "velvet", "violin", "walnut", "window", "winter", "zebra"),
)
FIRST = ("Alma", "Boris", "Carla", "David", "Elena", "Farid", "Greta", "Hugo", "Irina", "Jonas", "Karin", "Luis")
LAST = ("Abbott", "Berger", "Castro", "Dumont", "Egger", "Fischer", "Garcia", "Hansen", "Ivanov", "Jensen", "Keller")
CITIES = ("Oslo", "Lima", "Cairo", "Tokyo", "Paris", "Delhi", "Rome", "Quito", "Dublin", "Hanoi", "Accra", "Madrid")
JOBS = ("nurse", "pilot", "baker", "lawyer", "farmer", "plumber", "teacher", "painter", "driver", "chemist")


def keys(chance: Random, count: int) -> list[str]:
    """Such as "quiet-harbor"."""
    return [f"{adjective}-{noun}" for adjective, noun in chance.sample(list(product(ADJECTIVES, NOUNS)), count)]


def people(chance: Random, count: int) -> list[str]:
    return [f"{first} {last}" for first, last in chance.sample(list(product(FIRST, LAST)), count)]


def number(chance: Random, digits: int) -> str:
    """Without a leading zero."""
    return str(chance.randrange(10 ** (digits - 1), 10**digits))


def uuid(chance: Random) -> str:
    return str(UUID(int=chance.getrandbits(128), version=4))
