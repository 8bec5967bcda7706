# Judgement: the requirements of a contract on evidence, and the verdict on it.  Pure.
