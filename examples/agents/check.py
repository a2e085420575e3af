"""Two agents that share the policy: a writer adds two numbers, and a checker asks for another try."""


async def solve(row, client, model):
    """Return 1 if the last of at most three answers is right, else 0."""

    async def ask(role, messages):
        system = {"role": "system", "content": role}
        response = await client.chat.completions.create(model=model, messages=[system, *messages])
        return response.choices[0].message.content

    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(3):
        answer = await ask("add", messages)
        if await ask("check", [{"role": "user", "content": f"{row['prompt']}={answer}"}]) == "yes":
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    return float(answer == row["answer"])
