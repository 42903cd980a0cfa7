"""The transport of reducers' messages: process groups, agreement before messages are sent, order of collectives."""
