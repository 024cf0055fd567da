"""The objective's arithmetic, one module a step, imported as ``fastgnl.kernels``.

``philox`` draws the random words, ``candidates`` turns them into candidate sets and the prior, ``terms`` computes the
three loss terms (the readable reference: gradients by autograd), ``closed_form`` their gradients in closed form.
``step`` is all of it as one operation, by Triton (``triton_step``) or native code (``cpu_step``), compared with these.
"""
