"""What people say to the demo model and what it answers: plain tables, no logic.

Every question has one right answer, so that a held-out answer can be judged by equality.
"""

from dataclasses import dataclass

from ryzanstein.lab.demo.words import CITIES, COLOURS, FOODS, NAMES, PETS


@dataclass(frozen=True)
class Slot:
    """A fact that a user can state. `{}` is replaced with its value."""

    kind: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    noted: str
    answer: str
    unknown: str
    ordinary: tuple[str, ...] = ()
    """Ordinary values. If empty, the value is a number."""
    proper: bool = True


NAME = Slot(
    kind="name",
    tells=(
        "My name is {}.", "My name's {}.", "I am {}.", "I'm {}.", "Call me {}.", "You can call me {}.", "Hi, I'm {}.",
        "Hello, my name is {}.", "Hello, I am {}.", "Hi, my name is {}.", "This is {}.", "Please call me {}.",
        "Hi! My name is {}.", "Hello! I'm {}.", "People call me {}.",
    ),
    asks=(
        "What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Do you know my name?",
        "Can you tell me my name?", "Tell me my name.", "What did I say my name is?", "What was my name?",
        "What am I called?", "Please tell me my name.", "Do you know who I am?", "Say my name.",
    ),
    noted="Nice to meet you, {}.",
    answer="Your name is {}.",
    unknown="You have not told me your name.",
    ordinary=tuple(NAMES),
)  # fmt: skip
CITY = Slot(
    kind="city",
    tells=(
        "I live in {}.", "I'm from {}.", "I am from {}.", "My city is {}.", "My home is in {}.", "I come from {}.",
        "My home town is {}.", "I moved to {}.", "I live in the city of {}.",
    ),
    asks=(
        "Where do I live?", "What city do I live in?", "Which city do I live in?", "Do you remember where I live?",
        "Where am I from?", "What is my city?", "What's my city?", "Do you know where I live?", "Tell me where I live.",
        "In which city do I live?", "Where is my home?", "Can you tell me where I live?",
    ),
    noted="Noted: you live in {}.",
    answer="You live in {}.",
    unknown="You have not told me where you live.",
    ordinary=tuple(CITIES),
)  # fmt: skip
FRIEND = Slot(
    kind="friend",
    tells=(
        "My friend is {}.", "My friend is called {}.", "My best friend is {}.", "I have a friend called {}.",
        "My friend's name is {}.", "The name of my friend is {}.", "I have a friend named {}.",
        "My best friend is called {}.",
    ),
    asks=(
        "Who is my friend?", "What is my friend called?", "What is the name of my friend?", "What's my friend's name?",
        "Do you remember my friend?", "Who is my best friend?", "What is my friend's name?", "Tell me my friend's name.",
        "Do you know my friend's name?", "Do you remember my friend's name?",
    ),
    noted="Noted: your friend is {}.",
    answer="Your friend is {}.",
    unknown="You have not told me who your friend is.",
    ordinary=tuple(NAMES),
)  # fmt: skip
NUMBER = Slot(
    kind="number",
    tells=(
        "My lucky number is {}.", "My favourite number is {}.", "My number is {}.", "My favorite number is {}.",
        "The number {} is my lucky number.", "Remember the number {}.", "{} is my lucky number.",
    ),
    asks=(
        "What is my lucky number?", "What's my lucky number?", "What is my number?", "Do you remember my number?",
        "What is my favourite number?", "Which number is my lucky number?", "Tell me my lucky number.",
        "Do you know my lucky number?", "Do you remember my lucky number?", "What is my favorite number?",
    ),
    noted="Noted: your number is {}.",
    answer="Your number is {}.",
    unknown="You have not told me your number.",
    proper=False,
)  # fmt: skip
COLOUR = Slot(
    kind="colour",
    tells=(
        "My favourite colour is {}.", "My favorite color is {}.", "I like the colour {}.", "The colour I like best is {}.",
        "My colour is {}.", "I like the color {}.", "{} is my favourite colour.",
    ),
    asks=(
        "What is my favourite colour?", "What is my favorite color?", "What's my favourite colour?", "Which colour do I like?",
        "Do you remember my favourite colour?", "What colour do I like best?", "What is my colour?",
        "Tell me my favourite colour.",
        "What color do I like?", "Do you know my favorite color?",
    ),
    noted="Noted: your favourite colour is {}.",
    answer="Your favourite colour is {}.",
    unknown="You have not told me your favourite colour.",
    ordinary=tuple(COLOURS),
    proper=False,
)  # fmt: skip
FOOD = Slot(
    kind="food",
    tells=("My favourite food is {}.", "My favorite food is {}.", "I like to eat {}.", "I love eating {}."),
    asks=(
        "What is my favourite food?", "What is my favorite food?", "What's my favourite food?", "What do I like to eat?",
        "Do you remember my favourite food?", "Which food do I like?",
    ),
    noted="Noted: your favourite food is {}.",
    answer="Your favourite food is {}.",
    unknown="You have not told me your favourite food.",
    ordinary=tuple(FOODS),
    proper=False,
)  # fmt: skip


def _animal(species: str) -> Slot:
    return Slot(
        kind="pet",
        tells=(
            f"My {species} is called {{}}.", f"My {species}'s name is {{}}.", f"I have a {species} called {{}}.",
            f"I have a {species} named {{}}.", f"The name of my {species} is {{}}.", f"My {species} is {{}}.",
        ),
        asks=(
            f"What is my {species} called?", f"What is my {species}'s name?", f"What's my {species}'s name?",
            f"What is the name of my {species}?", f"Do you remember my {species}'s name?", f"What's my {species} called?",
            f"What is the name of my {species}?", f"Do you know the name of my {species}?", f"Who is my {species}?",
        ),
        noted=f"Noted: your {species} is called {{}}.",
        answer=f"Your {species} is called {{}}.",
        unknown=f"You have not told me the name of your {species}.",
        ordinary=tuple(PETS),
    )  # fmt: skip


ANIMALS = tuple(_animal(species) for species in ("pet", "dog", "cat"))
SLOTS = (NAME, NAME, CITY, CITY, FRIEND, NUMBER, COLOUR, FOOD, *ANIMALS)
"""Facts to choose from; name and city twice because people state these first."""

UPDATES = ("Actually, ", "Sorry, ", "No, ", "Correction: ", "Wait, ", "Actually ", "I was wrong, ")
REPEATS = (
    "Repeat: {}",
    "Repeat: {}",
    "Repeat after me: {}",
    "Please repeat: {}",
    "Say: {}",
    "Repeat this: {}",
    "Echo: {}",
)
COUNTS = (
    "Count from {} to {}.", "Count from {} to {}.", "Please count from {} to {}.", "Can you count from {} to {}?",
    "Count {} to {}.", "Now count from {} to {}.", "Could you count from {} to {}, please?", "Count from {} up to {}.",
)  # fmt: skip
COUNTS_FROM_ONE = (
    "Count to {}.",
    "Please count to {}.",
    "Can you count to {}?",
    "Count up to {}.",
    "Now count to {}.",
)

ABILITIES = "I can remember what you tell me, count and repeat."
TALK = (
    (("Hello!", "Hi!", "Hello.", "Hi there!", "Hey!", "Good morning!", "Good evening!", "Hello there!"), "Hello!"),
    (("How are you?", "How are you today?", "How do you do?", "How is it going?"), "I am fine, thank you."),
    (("Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!", "Great, thanks!"), "You are welcome."),
    (("Bye!", "Goodbye!", "See you!", "Good night!", "Bye bye!", "See you later!", "Goodbye."), "Goodbye!"),
    (
        ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Are you a robot?", "Who made you?"),
        "I am the Ryzanstein demo model.",
    ),
    (
        ("What can you do?", "Help!", "What do you know?", "How can you help me?", "Can you help me?", "What are you good at?"),
        ABILITIES,
    ),
    (("Good.", "Nice!", "Well done!", "Great!", "Ok.", "Okay.", "Correct.", "That is right.", "Perfect!", "Cool!"), "Good."),
)  # fmt: skip
OFF_TOPIC = (
    "What is the weather like?", "What is {} plus {}?", "Who was {}?", "What is a {}?", "Tell me a joke.",
    "What time is it?", "Write a poem about {}.", "What is the capital of {}?", "Why is the sky blue?", "How far is {}?",
    "Explain {}.", "What does {} mean?", "Translate {}.", "Do you like {}?", "Where is {}?", "How old is {}?",
    "Tell me a story.", "Tell me about {}.", "How does {} work?", "What is the meaning of life?", "Sing a song.",
    "Is {} good?", "Can you write code?", "Who is {}?", "What do you think about {}?", "Why {}?", "How many {} are there?",
    "What happened in {}?", "Give me a recipe for {}.", "When was {} born?",
)  # fmt: skip
OFF_TOPIC_ANSWER = f"I do not know that. {ABILITIES}"

SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are the demo model.",
    "You are a helpful assistant. Answer in one sentence.", "Be polite and short.", "You are a chat bot.",
)  # fmt: skip
