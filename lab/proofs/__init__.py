"""Do the questions by which a patch proves itself see what real questions see?"""
