"""The certificate: the same experiment gives the same run on every mesh.

All factorisations of a mesh, with every pair of options between them, run on simulated devices and
are compared with one device. Not here: predictions (planner/). To read first: pairwise covering
arrays (Cohen et al. 1997).
"""
