"""The questions to the reference model, on whose answers the head is trained."""

from __future__ import annotations

import random
from typing import Any

_REQUESTS = (
    "Explain {} to a ten-year-old.",
    "What is {}?",
    "Give me a short overview of {}.",
    "List five facts about {}.",
    "Why does {} matter?",
    "Write a short story that involves {}.",
    "Write a poem about {}.",
    "How would you teach a class about {}?",
    "What are common misconceptions about {}?",
    "Compare {} with something similar.",
    "Write an email to a colleague about {}.",
    "What should a beginner know about {}?",
    "Describe the history of {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a conversation between two friends about {}.",
    "Give step-by-step advice on {}.",
)
_SUBJECTS = (
    *("photosynthesis", "the French Revolution", "black holes", "compound interest", "sourdough bread", "vaccines"),
    *("the water cycle", "jazz music", "chess openings", "electric cars", "the Roman Empire", "machine learning"),
    *("honey bees", "volcanoes", "time management", "the stock market", "Shakespeare", "coral reefs", "gravity"),
    *("public speaking", "the solar system", "recycling", "the human heart", "renewable energy", "coffee", "tides"),
    *("the printing press", "glaciers", "meditation", "the Olympic Games", "antibiotics", "bridges", "origami"),
    *("the Great Wall of China", "computer networks", "tea ceremonies", "evolution", "earthquakes", "budgeting"),
    *("gardening", "the immune system", "philosophy", "satellites", "the Renaissance", "bicycles", "elephants"),
    *("climate change", "programming in Python", "the moon landing", "whales", "democracy", "origins of writing"),
    *("sleep", "the periodic table", "fairy tales", "probability", "cooking rice", "mountain climbing", "owls"),
    *("the Silk Road", "robots", "the ocean floor", "painting with watercolours", "magnets", "the alphabet", "trains"),
    *("job interviews", "the food chain", "ancient Egypt", "running a marathon", "databases", "friendship", "clouds"),
    *("learning a language", "electricity", "the violin", "rainforests", "video games", "maps", "penguins", "algebra"),
    *("urban planning", "the speed of light", "negotiation", "deserts", "dinosaurs", "supply and demand", "knitting"),
    *("writing unit tests", "the Industrial Revolution", "sharks", "astronomy", "first aid", "folk music", "spiders"),
    *("the Amazon river", "lighthouses", "fermentation", "encryption", "teamwork", "butterflies", "geometry", "salt"),
    *("the nervous system", "windmills", "science fiction", "the Aztecs", "home insurance", "pottery", "storms"),
)
HELD_OUT_SUBJECTS = 12
"""Number of subjects at the end of the list that are never used in training."""


def question_tokens(tokenizer: Any, content: str) -> list[int]:
    """Return the tokens of a user's message in the model's chat template, up to the beginning of the answer."""
    chat = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def chat_prompts(held_out: bool) -> list[str]:
    """Return every request about every subject, in a fixed order; held-out prompts have subjects of their own."""
    subjects = _SUBJECTS[-HELD_OUT_SUBJECTS:] if held_out else _SUBJECTS[:-HELD_OUT_SUBJECTS]
    prompts = [request.format(subject) for subject in subjects for request in _REQUESTS]
    random.Random(0).shuffle(prompts)
    return prompts
