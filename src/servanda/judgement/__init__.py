# Judgement: what a contract asks of evidence, and what the evidence answers.  Pure.
