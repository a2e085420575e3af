"""An agent that finds a number: the model guesses, and learns whether the number is higher or lower."""


async def solve(row, client, model):
    """Return 1 if one of six guesses is the number row["answer"], else 0."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(6):
        response = await client.chat.completions.create(model=model, messages=messages)
        guess = response.choices[0].message.content
        if guess == row["answer"]:
            return 1.0
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint(guess, row["answer"])}]
    return 0.0


def hint(guess: str, number: str) -> str:
    """Return the reply to a guess that is not the number."""
    if not (guess.isascii() and guess.isdigit()):
        return "no number"
    return "higher" if int(number) > int(guess) else "lower"
