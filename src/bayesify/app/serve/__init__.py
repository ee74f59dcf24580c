"""The service of ``bayesify serve``: predictions with uncertainty over HTTP, and a page for people.

It needs the extra ``serve``. Nothing of a request is executed, and no pickle is read.
"""
