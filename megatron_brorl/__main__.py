"""python -m megatron_brorl: what torchrun starts. The guard is needed: Megatron's checkpoint writer spawns processes."""

if __name__ == "__main__":
    from megatron_brorl.cli import main

    main()
