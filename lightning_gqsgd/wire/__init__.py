"""How the messages of reducers travel: process groups, what ranks agree on beforehand, the order of collectives."""
