"""A harness for comparing numbers of rollouts per prompt: designs that are declared and hashed before they are run.

command.py reads what was asked; design.py is what a design may say; order.py the runs of a phase in their order;
warm_start.py, trial.py and pilot.py what a process does, places.py where it leaves that; processes.py starts them, one
run at a time; results.py the table; end_points.py, plateau.py, best_n.py and inference.py how it is read; page.py,
map_page.py and figures.py what is shown of it.
"""
