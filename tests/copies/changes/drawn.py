"""Print what each rank draws in an epoch."""


def change(script, rank):
    class Sampler(script.WeightedSampler):
        def __iter__(self):
            drawn = list(super().__iter__())
            print(f"drawn {rank} {drawn}", flush=True)
            return iter(drawn)

    script.WeightedSampler = Sampler
