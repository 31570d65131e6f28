"""A structure-aware fuzzer of every file that zeroshard reads.

    make fuzz ARGS="--cases 5000 --seed 7"                          # all kinds of files
    make fuzz ARGS="--only 'forged checkpoint' --cases 1 --seed 123"     # one case again

A case makes good files, changes one of them, and reads them. Reading must end in time and in little memory. Either it
refuses the files, and the message names the file in a few plain lines; or what it read makes sense. ``subjects`` has
the kinds of files, ``mutation`` the changes, ``run`` the processes and their limits.
"""
