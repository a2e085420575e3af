"""Two agents that share the policy: a writer spells a word backward, and a checker asks for another try."""


async def solve(row, client, model):
    """Return 1 if the checker accepts one of three answers, and this one is right, else 0."""

    async def ask(role, messages):
        system = {"role": "system", "content": role}
        response = await client.chat.completions.create(model=model, messages=[system, *messages])
        return response.choices[0].message.content

    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        answer = await ask("reverse", messages)
        if await ask("check", [{"role": "user", "content": f"{row['prompt']} = {answer}"}]) == "yes":
            return float(answer == row["answer"])
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    return 0.0
