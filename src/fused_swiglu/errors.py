"""The one error that bad input raises."""


class ArgumentError(ValueError):
    """An argument that cannot be used: names it, says what is wrong and what to do instead.

    The command line prints it as one line and exits with code 2.
    """

    def __init__(self, argument: str, wrong: str, remedy: str) -> None:
        super().__init__(f"{argument}: {wrong}; {remedy}")
        self.argument = argument
        self.wrong = wrong
        self.remedy = remedy

    def __reduce__(self):
        return type(self), (self.argument, self.wrong, self.remedy)
