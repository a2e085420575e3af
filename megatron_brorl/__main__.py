"""python -m megatron_brorl: what torchrun starts. Megatron's checkpoint writer spawns, so it needs the guard."""

if __name__ == "__main__":
    from megatron_brorl.cli import main

    main()
